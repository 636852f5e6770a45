"""What every request over TCP passes before it is answered: its method, its body, its name for us, who asks; and headers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from hookd.tool.daemon.web import passwords
from hookd.tool.daemon.web.passwords import Guesses, Passwords

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

    from hookd.tool.daemon.api import Handler
    from hookd.tool.daemon.web.access import Access
    from hookd.tool.daemon.web.host_names import Names

METHODS = ("GET", "HEAD")
CHALLENGE = {"WWW-Authenticate": 'Basic realm="hookd", charset="UTF-8"'}
_log = logging.getLogger(__name__)


class Guard:
    """Stands before an application.

    Args:
        app: it is changed.
        access: who may ask.
        names: of the daemon.
    """

    def __init__(self, app: web.Application, access: Access, names: Names) -> None:
        self._access = access
        self._names = names
        self._passwords = Passwords(Guesses())
        app.middlewares.insert(0, self._middleware())
        app.on_response_prepare.insert(0, self._add_headers)  # first: the application's own are defaults
        app.on_cleanup.append(self._close)

    def _middleware(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            refusal = await self._refusal(request)
            if refusal is not None:
                refusal.force_close()  # nothing that came with it is taken for another request
                return refusal
            try:
                return await handler(request)
            except (web.HTTPException, ConnectionError):  # the latter: who asked has gone
                raise
            except Exception:  # noqa: BLE001  ours: who asks is told no more than that
                _log.exception("%s %s", request.method, request.path)
                return web.Response(status=500, text="the daemon failed, its log says why\n")

        return guard

    async def _refusal(self, request: web.Request) -> web.Response | None:
        if request.method not in METHODS:
            return web.Response(status=405, text="only read\n", headers={"Allow": ", ".join(METHODS)})
        if request.body_exists:
            return web.Response(status=413, text="no body\n")
        if _is_of_another_site(request):
            return web.Response(status=403, text="a page of another site may link to hookd, but not read it\n")
        self._access.refresh()
        if self._access.users:
            return await self._unknown(request, request.remote or "")
        return None if self._access.context is not None else self._misdirected(request)

    def _misdirected(self, request: web.Request) -> web.Response | None:
        """Refuse a request under a name that is not ours.

        With TLS or passwords every name will do: a browser has neither a certificate of ours for the name of another
        site, nor does it send there the password that it was told for ours.
        """
        hosts = request.headers.getall("Host", [])
        if hosts:  # no browser leaves it out; and without it `request.host` asks the name service who we are
            hosts.append(request.host)  # that of an absolute URI, where the request has one
        refusal = next(filter(None, map(self._names.refusal, hosts)), None)
        return None if refusal is None else web.Response(status=421, text=refusal)

    async def _unknown(self, request: web.Request, address: str) -> web.Response | None:
        """Refuse who is no user. Who is known already is let in, however much others guess from the same address."""
        given = passwords.credentials(request.headers.get("Authorization", ""))
        users = self._access.users
        if given is None:
            return web.Response(status=401, text="a name and a password are needed\n", headers=CHALLENGE)
        try:
            if await self._passwords.check(users, *given, address):
                return None
        except passwords.GuessingError:
            return web.Response(status=429, text="too many wrong passwords\n", headers={"Retry-After": "10"})
        except passwords.BusyError:
            return web.Response(status=503, text="too many passwords at once\n", headers={"Retry-After": "1"})
        return web.Response(status=401, text="no such name with such a password\n", headers=CHALLENGE)

    async def _add_headers(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "hookd"  # and not the versions of what it runs on
        for name, value in self._access.headers.items():
            response.headers[name] = value

    async def _close(self, _: web.Application) -> None:
        self._passwords.close()


def _is_of_another_site(request: web.Request) -> bool:
    """Whether a browser asks on behalf of a page of another site, and not because a person follows a link there."""
    headers = request.headers
    return headers.get("Sec-Fetch-Site") == "cross-site" and headers.get("Sec-Fetch-Mode") != "navigate"
