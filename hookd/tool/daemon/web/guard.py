"""Checks of every request over TCP: method, body, Host, credentials. Also adds the configured headers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from hookd.tool.daemon.web import passwords
from hookd.tool.daemon.web.passwords import GuessLimit, Passwords

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

    from hookd.tool.daemon.api import Handler
    from hookd.tool.daemon.web.access import Access
    from hookd.tool.daemon.web.host_names import HostNames

METHODS = ("GET", "HEAD")
CHALLENGE = {"WWW-Authenticate": 'Basic realm="hookd", charset="UTF-8"'}
_log = logging.getLogger(__name__)


class Guard:
    """Middleware that checks all requests of an application.

    Args:
        app: the application; its middlewares are changed.
    """

    def __init__(self, app: web.Application, access: Access, names: HostNames) -> None:
        self._access = access
        self._names = names
        self._passwords = Passwords(GuessLimit())
        app.middlewares.insert(0, self._middleware())
        app.on_response_prepare.insert(0, self._add_headers)  # first: the application only sets defaults
        app.on_cleanup.append(self._close)

    def _middleware(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            refusal = await self._refusal(request)
            if refusal is not None:
                refusal.force_close()  # so that the rest of the input is not parsed as another request
                return refusal
            try:
                return await handler(request)
            except (web.HTTPException, ConnectionError):  # ConnectionError: the client has disconnected
                raise
            except Exception:  # noqa: BLE001  a bug: the client gets no details
                _log.exception("%s %s", request.method, request.path)
                return web.Response(status=500, text="internal error, see the log of the daemon\n")

        return guard

    async def _refusal(self, request: web.Request) -> web.Response | None:
        if request.method not in METHODS:
            return web.Response(
                status=405, text="only GET and HEAD are allowed\n", headers={"Allow": ", ".join(METHODS)}
            )
        if request.body_exists:
            return web.Response(status=413, text="a request body is not allowed\n")
        if _is_of_another_site(request):
            return web.Response(status=403, text="pages of other sites may link to hookd, but not read it\n")
        self._access.refresh()
        if self._access.users:
            return await self._unknown(request, request.remote or "")
        return None if self._access.context is not None else self._misdirected(request)

    def _misdirected(self, request: web.Request) -> web.Response | None:
        """Return a refusal if the Host is not one of the daemon's names. Only needed without TLS and passwords."""
        # With TLS a rebound name fails the browser's certificate check; with passwords the browser does not send those of
        # our site to another one.
        hosts = request.headers.getall("Host", [])
        if hosts:  # every browser sends it; without it `request.host` would query the name service
            hosts.append(request.host)  # the host of an absolute URI, if the request has one
        refusal = next(filter(None, map(self._names.refusal, hosts)), None)
        return None if refusal is None else web.Response(status=421, text=refusal)

    async def _unknown(self, request: web.Request, address: str) -> web.Response | None:
        """Return a refusal unless the credentials are valid. Known users pass even while their address is rate-limited."""
        given = passwords.credentials(request.headers.get("Authorization", ""))
        users = self._access.users
        if given is None:
            return web.Response(status=401, text="a user name and a password are required\n", headers=CHALLENGE)
        try:
            if await self._passwords.check(users, *given, address):
                return None
        except passwords.GuessingError:
            return web.Response(status=429, text="too many wrong passwords\n", headers={"Retry-After": "10"})
        except passwords.BusyError:
            return web.Response(status=503, text="too many password checks at once\n", headers={"Retry-After": "1"})
        return web.Response(status=401, text="wrong user name or password\n", headers=CHALLENGE)

    async def _add_headers(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "hookd"  # instead of the versions of aiohttp and Python
        for name, value in self._access.headers.items():
            response.headers[name] = value

    async def _close(self, _: web.Application) -> None:
        self._passwords.close()


def _is_of_another_site(request: web.Request) -> bool:
    """Whether a browser requests this for a page of another site, other than by following a link."""
    headers = request.headers
    return headers.get("Sec-Fetch-Site") == "cross-site" and headers.get("Sec-Fetch-Mode") != "navigate"
