"""The web configuration in use: its TLS context and its users, read again whenever one of its files changes.

So a certificate is renewed, or a user is locked out, without a restart. Three things differ from exporter-toolkit, which
reads everything for each request and refuses all while a file is wrong: files are read only when they have changed; one
that is wrong leaves the former state in use, because certificate and key are never replaced at one moment; and neither
encryption nor passwords are given up without a restart, because a file that is being written is empty for a moment.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from typing import TYPE_CHECKING

from hookd.errors import ConfigError
from hookd.tool.config import webconfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from hookd.tool.config.webconfig import ServerTLS, WebConfig

_OTHERS = 0o007
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_VERIFIES = {
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_NONE,  # nothing is done with what it would bring
    "RequireAnyClientCert": ssl.CERT_REQUIRED,  # Python checks what it asks for: stricter than Go
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_log = logging.getLogger(__name__)


class Access:
    """A web configuration, always as its files are now. For the event loop: a look at the files takes microseconds.

    Args:
        path: of the file; None: everybody may read, unencrypted.

    Attributes:
        config: as it was last read without a mistake.
        context: for the next connection; None: no TLS.
    """

    def __init__(self, path: Path | None) -> None:
        """Read the files.

        Raises:
            ConfigError: what is wrong with them.
        """
        self._path = path
        self.config: WebConfig | None = None
        self.context: ssl.SSLContext | None = None
        self._seen: tuple[object, ...] = ()
        if path is not None:
            self.config, self.context, self._seen = _loaded(path)
            self._warn()

    @property
    def users(self) -> Mapping[str, str]:
        """Give the bcrypt hashes by name; empty: everybody may read."""
        return self.config.users if self.config is not None else {}

    @property
    def headers(self) -> Mapping[str, str]:
        """Give the headers of every answer."""
        return self.config.headers if self.config is not None else {}

    @property
    def sans(self) -> frozenset[str]:
        """Give the names of which a client's certificate must hold one; empty: any will do."""
        tls = self.config.tls if self.config is not None else None
        return tls.client_allowed_sans if tls is not None else frozenset()

    def refresh(self) -> None:
        """Read the files again if one has changed since; a mistake is logged once, and what was read before holds."""
        if self._path is None or self.config is None or _signatures(self.config) == self._seen:
            return
        try:
            config, context, seen = _loaded(self._path)
            self._require_no_less(config)
        except ConfigError as error:
            self._seen = _signatures(self.config)
            _log.error("the web configuration is wrong, what it said before holds: %s", error.message)  # noqa: TRY400
            return
        self.config, self.context, self._seen = config, context, seen
        _log.info("read the web configuration %s again", self._path)
        self._warn()

    def _require_no_less(self, config: WebConfig) -> None:
        assert self.config is not None
        lost = [
            name
            for name, before, after in (
                ("tls_server_config", self.config.tls, config.tls),
                ("basic_auth_users", self.config.users, config.users),
            )
            if before and not after
        ]
        before, after = self.config.tls, config.tls
        if before is not None and after is not None:
            lost += [
                key for key in ("client_auth_type", "client_allowed_sans") if _asks(before, key) > _asks(after, key)
            ]
        if lost or (config.tls is not None and self.config.tls is None):
            what = f"without {' and '.join(lost)}" if lost else "with tls_server_config"
            raise ConfigError(f"{self._path} is {what} now, which takes a restart")

    def _warn(self) -> None:
        assert self.config is not None
        for text in _warnings(self.config):
            _log.warning(text)


def _asks(tls: ServerTLS, key: str) -> int:
    """Say how much of clients is asked by one of the two keys that do."""
    if key == "client_auth_type":
        return int(_VERIFIES[tls.client_auth_type])
    return int(bool(tls.client_allowed_sans))


def check(path: Path) -> list[str]:
    """Read a web configuration and the certificates that it names; return what the operator is warned of.

    Raises:
        ConfigError: what is wrong with them.
    """
    config, _, _ = _loaded(path)
    return list(_warnings(config))


def _warnings(config: WebConfig) -> Iterator[str]:
    if config.tls is not None and _mode(config.tls.key_file) & _OTHERS:
        path = config.tls.key_file
        yield f"others can read the key {path}: `chmod o= {path}`, and make a new one"
    if config.users and _others_read(config.path):
        yield f"others can read the password hashes in {config.path}, and guess at them: `chmod go= {config.path}`"
    if config.tls is None and not config.users:
        yield f"the web configuration {config.path} asks for neither TLS nor passwords"


def _others_read(path: Path) -> bool:
    """Whether users can read a file who are not in a group of root's or of our own."""
    status = path.stat()
    return bool(status.st_mode & (stat.S_IROTH | (stat.S_IRGRP if status.st_gid not in (0, os.getegid()) else 0)))


def _loaded(path: Path) -> tuple[WebConfig, ssl.SSLContext | None, tuple[object, ...]]:
    first = _signature(path)  # before it is read: what changes meanwhile is read next time
    config = webconfig.read(path)
    seen = (first, *_signatures(config)[1:])
    return config, None if config.tls is None else _context(config.tls), seen


def _signatures(config: WebConfig) -> tuple[object, ...]:
    tls = config.tls
    files = [] if tls is None else [tls.cert_file, tls.key_file, tls.client_ca_file]
    return tuple(_signature(path) for path in (config.path, *files) if path is not None)


def _context(tls: ServerTLS) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[tls.min_version], _VERSIONS[tls.max_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    if tls.prefers_own:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    if tls.ciphers is not None:
        _attempt("cipher_suites", lambda: context.set_ciphers(":".join(tls.ciphers or ())))
    for path in filter(None, (tls.cert_file, tls.key_file, tls.client_ca_file)):
        _require_file(path)
    both = f"cert_file {tls.cert_file} and key_file {tls.key_file}"
    # Without this word OpenSSL asks for the passphrase of a key on the terminal, and waits.
    _attempt(both, lambda: context.load_cert_chain(tls.cert_file, tls.key_file, password=_no_passphrase))
    if tls.client_ca_file is not None:
        _attempt(f"client_ca_file {tls.client_ca_file}", lambda: context.load_verify_locations(tls.client_ca_file))
    context.verify_mode = _VERIFIES[tls.client_auth_type]
    return context


def _no_passphrase() -> str:
    raise ConfigError("the key has a passphrase: give one without (`openssl pkey`)")


def _attempt(what: str, use: Callable[[], None]) -> None:
    try:
        use()
    except ssl.SSLError as exc:
        raise ConfigError(f"{what} cannot be used: {(exc.reason or 'no PEM').replace('_', ' ').lower()}") from exc
    except OSError as exc:
        raise ConfigError(f"{what} cannot be read: {exc.strerror}") from exc


def _require_file(path: Path) -> None:
    """Refuse what is no file: to open a pipe would wait for ever."""
    try:
        mode = path.stat().st_mode
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is no file")


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0


def _signature(path: Path) -> object:
    try:
        status = os.stat(path)  # noqa: PTH116  follows links: Kubernetes renews a secret by turning one
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
