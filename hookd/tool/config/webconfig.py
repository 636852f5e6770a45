"""Read a web configuration: TLS and users of the TCP listener, in the format of exporter-toolkit.

tls_server_config:
  cert_file: server.crt                         # paths are relative to this file
  key_file: server.key
  client_auth_type: RequireAndVerifyClientCert  # mTLS
  client_ca_file: clients.crt
basic_auth_users:
  prometheus: $2b$10$…                          # bcrypt

Source of the format: docs/web-configuration.md and web/tls_config.go of exporter-toolkit 0.15. A setting that Python cannot
implement is refused by name, never ignored: a setting that silently has no effect would be a security hole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import yaml

from hookd.api.compatibility import nearest
from hookd.errors import ConfigError
from hookd.tool.config import ownership

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MAX_BYTES = 1 << 20
"""Maximum size of such a file."""
CLIENT_AUTH_TYPES = (
    "NoClientCert", "RequestClientCert", "RequireAnyClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert",
)  # fmt: skip
VERSIONS = ("TLS12", "TLS13")
HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
"""Headers that may be set, with the allowed values of each; () allows any. Source: web/handler.go."""
_UNSUPPORTED = {
    "cert": "write the certificate to a file, and name it as cert_file",
    "key": "write the key to a file that only you can read, and name it as key_file",
    "client_ca": "write the certificates to a file, and name it as client_ca_file",
    "curve_preferences": "Python's ssl cannot choose several curves; leave it out, OpenSSL's default is good",
    "rate_limit": "hookd has limits of its own (docs/security.md); leave it out",
}
_OLD_VERSIONS = ("TLS10", "TLS11")
_HASH = re.compile(r"\$2[abxy]?\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}\Z", re.ASCII)
# OpenSSL's names, by those of Go's crypto/tls. For TLS 1.3 neither Go's nor Python's library offers a choice.
_CIPHERS = {
    f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{openssl}"
    for key in ("ECDSA", "RSA")
    for go, openssl in {
        "AES_128_GCM_SHA256": "AES128-GCM-SHA256",
        "AES_256_GCM_SHA384": "AES256-GCM-SHA384",
        "CHACHA20_POLY1305_SHA256": "CHACHA20-POLY1305",
        "AES_128_CBC_SHA": "AES128-SHA",
        "AES_256_CBC_SHA": "AES256-SHA",
    }.items()
}
_CIPHERS_13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")


@dataclass(frozen=True)
class ServerTLS:
    """The table `tls_server_config`.

    Attributes:
        cert_file, key_file: of the server, PEM.
        client_ca_file: CA certificates that clients' certificates are verified against.
        client_auth_type: one of CLIENT_AUTH_TYPES.
        client_allowed_sans: if not empty, a client's certificate must contain one of these names.
        min_version, max_version: two of VERSIONS.
        ciphers: OpenSSL's names of the cipher suites for TLS 1.2; None for OpenSSL's default.
        prefers_own: whether the server's order of ciphers applies, not the client's.
    """

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    client_auth_type: str = "NoClientCert"
    client_allowed_sans: frozenset[str] = frozenset()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    ciphers: tuple[str, ...] | None = None
    prefers_own: bool = True


@dataclass(frozen=True)
class WebConfig:
    """A web configuration.

    Attributes:
        path: of the file.
        tls: None if connections are not encrypted.
        headers: of each response, in place of hookd's own.
        users: bcrypt hashes by user name; if empty, everybody may read.
    """

    path: Path
    tls: ServerTLS | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict, repr=False)


def read(path: Path) -> WebConfig:
    """Read a web configuration, but not the certificates that it names.

    Raises:
        ConfigError: all mistakes, one per line, each with its line in the file.
    """
    return _Reader(path).config(_parsed(path))


def _parsed(path: Path) -> yaml.Node | None:
    if path.exists() and not path.is_file():  # opening a pipe would block forever
        raise ConfigError(f"{path} is not a regular file", hint="Give another with --web-config.")
    try:
        with ownership.open_checked(path) as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_BYTES} bytes: it is not a web configuration")
        root: yaml.Node | None = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}", hint="Give another file with --web-config.") from exc
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark is not None else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {exc.problem}") from exc
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{path} is not valid YAML: {exc}") from exc
    return root


class _Reader:
    """Reads the nodes of one file, and collects all mistakes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._problems: list[str] = []

    def config(self, root: yaml.Node | None) -> WebConfig:
        tables = dict(self._pairs(root, "the file", "tls_server_config http_server_config basic_auth_users".split()))
        config = WebConfig(
            self._path,
            self._tls(tables.get("tls_server_config")),
            self._http(tables.get("http_server_config")),
            dict(self._users(tables.get("basic_auth_users"))),
        )
        if self._problems:
            raise ConfigError("\n".join(self._problems))
        return config

    # ---- the tables

    def _tls(self, table: yaml.Node | None) -> ServerTLS | None:
        texts = {"cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version", "max_version"}
        lists = {"client_allowed_sans", "cipher_suites"}
        nodes = dict(self._pairs(table, "tls_server_config", [*texts, *lists, "prefer_server_cipher_suites"]))
        if table is None or not nodes:
            return None
        given = {name: self._text(node) for name, node in nodes.items() if name in texts}
        many = {name: self._texts(node) for name, node in nodes.items() if name in lists}
        for name in ("cert_file", "key_file"):
            if not given.get(name):
                self._wrong(table, f"tls_server_config has no {name}")
        how = self._one_of(nodes, given, "client_auth_type", CLIENT_AUTH_TYPES, "NoClientCert")
        least, most = (self._version(nodes, given, f"{end}_version") for end in ("min", "max"))
        if VERSIONS.index(least or "TLS12") > VERSIONS.index(most or "TLS13"):
            self._wrong(nodes["min_version"], "min_version is above max_version")
        ciphers = self._ciphers(nodes, many)
        if ciphers == () and (most or "TLS13") == "TLS12":
            self._wrong(
                nodes["cipher_suites"], "with max_version TLS12, cipher_suites must name at least one of TLS 1.2"
            )
        sans = frozenset(many.get("client_allowed_sans", ()))
        self._check_clients(table, how, has_ca=bool(given.get("client_ca_file")), has_sans=bool(sans))
        return ServerTLS(
            cert_file=self._file(given.get("cert_file")),
            key_file=self._file(given.get("key_file")),
            client_ca_file=self._file(given["client_ca_file"]) if given.get("client_ca_file") else None,
            client_auth_type=how,
            client_allowed_sans=sans,
            min_version="TLS13" if ciphers == () else least or "TLS12",
            max_version=most or "TLS13",
            ciphers=ciphers or None,
            prefers_own=self._switch(nodes.get("prefer_server_cipher_suites"), default=True),
        )

    def _check_clients(self, table: yaml.Node, how: str, *, has_ca: bool, has_sans: bool) -> None:
        if has_ca and how == "NoClientCert":
            self._wrong(
                table, "client_ca_file without a client_auth_type has no effect: write RequireAndVerifyClientCert"
            )
        if not has_ca and how not in ("NoClientCert", "RequestClientCert"):
            self._wrong(table, f"{how} requires a client_ca_file: without one, any certificate would be accepted")
        if has_sans and not how.startswith("Require"):
            self._wrong(table, "client_allowed_sans requires the client_auth_type RequireAndVerifyClientCert")

    def _ciphers(self, nodes: Mapping[str, yaml.Node], many: Mapping[str, list[str]]) -> tuple[str, ...] | None:
        """Return OpenSSL's names of the chosen cipher suites for TLS 1.2.

        The result is () if only suites of TLS 1.3 are chosen, None if none is.
        """
        names = many.get("cipher_suites")
        if not names:
            return None
        for name in names:
            if name not in _CIPHERS and name not in _CIPHERS_13:
                self._wrong(nodes["cipher_suites"], f"there is no cipher suite '{name}'; {nearest(name, _CIPHERS)}")
        return tuple(_CIPHERS[name] for name in names if name in _CIPHERS)

    def _version(self, nodes: Mapping[str, yaml.Node], given: Mapping[str, str], name: str) -> str:
        if given.get(name) in _OLD_VERSIONS:
            self._wrong(nodes[name], f"{name} {given[name]} is broken (RFC 8996): write TLS12 or TLS13")
            return ""
        return self._one_of(nodes, given, name, VERSIONS, "")

    def _http(self, table: yaml.Node | None) -> dict[str, str]:
        nodes = dict(self._pairs(table, "http_server_config", ["http2", "headers"]))
        self._switch(nodes.get("http2"), default=True)  # hookd has no HTTP/2: the value is only validated
        headers = {}
        for name, node in self._pairs(nodes.get("headers"), "headers", list(HEADERS)):
            value = self._text(node)
            if HEADERS[name] and value not in ("", *HEADERS[name]):
                self._wrong(node, f"{name} must be {' or '.join(HEADERS[name])}")
            elif any(not 32 <= ord(letter) < 127 for letter in value):
                self._wrong(node, f"{name} contains a character that is not allowed in a header")
            elif value:
                headers[name] = value
        return headers

    def _users(self, table: yaml.Node | None) -> Iterator[tuple[str, str]]:
        for name, node in self._pairs(table, "basic_auth_users", None):
            hashed = self._text(node)
            if not _HASH.match(hashed):
                self._wrong(
                    node, "this is not a bcrypt hash: `htpasswd -nBC 10 NAME` makes one"
                )  # not quoted, it may be the password
            elif ":" in name or not name:
                self._wrong(node, "a user name must not be empty or contain a colon")
            else:
                yield name, hashed

    # ---- single values

    def _pairs(self, table: yaml.Node | None, what: str, known: list[str] | None) -> Iterator[tuple[str, yaml.Node]]:
        if table is None or (isinstance(table, yaml.ScalarNode) and table.tag.endswith(":null")):
            return
        if not isinstance(table, yaml.MappingNode):
            self._wrong(table, f"{what} is not a table")
            return
        seen: set[str] = set()
        for key, value in table.value:
            name = self._text(key)
            if name in seen:
                self._wrong(key, f"{what} has '{name}' twice")
            elif known is not None and name in _UNSUPPORTED:
                self._wrong(key, f"{name} is not supported: {_UNSUPPORTED[name]}")
            elif known is not None and name not in known:
                self._wrong(key, f"{what} has no key '{name}'; {nearest(name, known)}")
            else:
                seen.add(name)
                yield name, value

    def _text(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            return "" if node.tag.endswith(":null") else str(node.value)
        self._wrong(node, "a text is required here")
        return ""

    def _texts(self, node: yaml.Node) -> list[str]:
        if isinstance(node, yaml.SequenceNode):
            return [self._text(item) for item in node.value]
        if self._text(node):
            self._wrong(node, "a list is required here")
        return []

    def _switch(self, node: yaml.Node | None, *, default: bool) -> bool:
        if node is None:
            return default
        text = self._text(node).lower()
        if text not in ("true", "false"):
            self._wrong(node, "true or false is required here")
        return text == "true"

    def _one_of(
        self, nodes: Mapping[str, yaml.Node], given: Mapping[str, str], name: str, known: tuple[str, ...], default: str
    ) -> str:
        value = given.get(name) or default
        # RequireClientCert is the toolkit's former name of this type.
        value = "RequireAnyClientCert" if value == "RequireClientCert" else value
        if value in (default, *known):
            return value
        self._wrong(nodes[name], f"{name} must be {', '.join(known)}, not '{value}'")
        return default

    def _file(self, text: str | None) -> Path:
        return self._path.parent / (text or "")

    def _wrong(self, node: yaml.Node, why: str) -> None:
        self._problems.append(f"{self._path}:{node.start_mark.line + 1}: {why}")
