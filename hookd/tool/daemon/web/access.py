"""The active web configuration: TLS context and users, reloaded whenever one of its files changes.

So certificates can be renewed and users locked out without a restart. This differs in three ways from exporter-toolkit,
which reads everything for each request and refuses all requests while a file is invalid:

- Files are read only when they have changed.
- An invalid file leaves the previous state in use, because certificate and key are never replaced at the same moment.
- TLS and passwords are never dropped without a restart, because a file that is being written is empty for a moment.
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
    "RequestClientCert": ssl.CERT_NONE,  # the certificate would not be used
    "RequireAnyClientCert": ssl.CERT_REQUIRED,  # Python also verifies it: stricter than Go
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_log = logging.getLogger(__name__)


class Access:
    """A web configuration that follows its files. For the event loop: checking the files takes microseconds.

    Args:
        path: path of the file; None for unencrypted access without passwords.

    Attributes:
        config: the last valid configuration.
        context: the TLS context for the next connection; None without TLS.
    """

    def __init__(self, path: Path | None) -> None:
        """Read the files.

        Raises:
            ConfigError: a file is invalid.
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
        """The bcrypt hashes by user name; empty if no password is required."""
        return self.config.users if self.config is not None else {}

    @property
    def headers(self) -> Mapping[str, str]:
        """Additional headers of every response."""
        return self.config.headers if self.config is not None else {}

    @property
    def sans(self) -> frozenset[str]:
        """HostNames of which a client certificate must contain one; empty if any certificate is accepted."""
        tls = self.config.tls if self.config is not None else None
        return tls.client_allowed_sans if tls is not None else frozenset()

    def refresh(self) -> None:
        """Reload the files if one has changed; log an error once and keep the previous configuration."""
        if self._path is None or self.config is None or _signatures(self.config) == self._seen:
            return
        try:
            config, context, seen = _loaded(self._path)
            self._require_no_less(config)
        except ConfigError as error:
            self._seen = _signatures(self.config)
            _log.error("the web configuration is invalid, the previous one stays in use: %s", error.message)  # noqa: TRY400
            return
        self.config, self.context, self._seen = config, context, seen
        _log.info("reloaded the web configuration %s", self._path)
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
    """Return how strictly a client setting restricts clients; larger is stricter."""
    if key == "client_auth_type":
        return int(_VERIFIES[tls.client_auth_type])
    return int(bool(tls.client_allowed_sans))


def check(path: Path) -> list[str]:
    """Read a web configuration and its certificates, and return warnings for the operator.

    Raises:
        ConfigError: a file is invalid.
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
    """Whether users outside root's group and our own can read a file."""
    status = path.stat()
    return bool(status.st_mode & (stat.S_IROTH | (stat.S_IRGRP if status.st_gid not in (0, os.getegid()) else 0)))


def _loaded(path: Path) -> tuple[WebConfig, ssl.SSLContext | None, tuple[object, ...]]:
    first = _signature(path)  # taken before reading: a concurrent change is then noticed next time
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
    # Without a password callback OpenSSL prompts for the passphrase on the terminal, and waits.
    _attempt(both, lambda: context.load_cert_chain(tls.cert_file, tls.key_file, password=_no_passphrase))
    if tls.client_ca_file is not None:
        _attempt(f"client_ca_file {tls.client_ca_file}", lambda: context.load_verify_locations(tls.client_ca_file))
    context.verify_mode = _VERIFIES[tls.client_auth_type]
    return context


def _no_passphrase() -> str:
    raise ConfigError("the key has a passphrase: use a key without one (`openssl pkey`)")


def _attempt(what: str, use: Callable[[], None]) -> None:
    try:
        use()
    except ssl.SSLError as exc:
        raise ConfigError(f"{what} cannot be used: {(exc.reason or 'no PEM').replace('_', ' ').lower()}") from exc
    except OSError as exc:
        raise ConfigError(f"{what} cannot be read: {exc.strerror}") from exc


def _require_file(path: Path) -> None:
    """Raise for anything but a regular file, because opening a pipe would block forever."""
    try:
        mode = path.stat().st_mode
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is not a regular file")


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0


def _signature(path: Path) -> object:
    try:
        status = os.stat(path)  # noqa: PTH116  follows symlinks: Kubernetes renews a secret by switching one
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
