"""Read where the daemon sends incidents: `[[webhook]]`.

[[webhook]]
url = "https://alerts.example.org/hookd"
secret_file = "/etc/hookd/webhook.secret"  # signs each message; or `secret`, the key itself
kinds = ["nan", "inf", "hang", "lost"]     # by default all
labels = { severity = "critical", team = "vision" }
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hookd.errors import ConfigError
from hookd.tool.config.tables import read_tables, read_texts
from hookd.tool.config.values import read_text, read_url

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "whsec_"
"""Prefix of a base64 secret, as in Standard Webhooks."""
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


@dataclass(frozen=True)
class Webhook:
    """One `[[webhook]]`.

    Attributes:
        url: where messages are posted; it may contain a secret itself, so only `host` is ever shown.
        secret: the key that signs messages; None if they are not signed.
        kinds: of incidents to send; empty for all.
        labels: added to those of each message.
    """

    url: str = field(repr=False)
    secret: bytes | None = field(default=None, repr=False)
    kinds: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """An identifier that stays the same after a restart."""
        return "webhook-" + hashlib.sha256(self.url.encode()).hexdigest()[:16]

    @property
    def host(self) -> str:
        """The part of the address that may be shown."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def read_webhooks(content: object, source: str, problems: list[str]) -> tuple[Webhook, ...]:
    """Read the array of tables `[[webhook]]`, and append mistakes to `problems`."""
    tables = read_tables(content, "webhook", source, _READERS, problems)
    webhooks = [hook for where, values in tables if (hook := _webhook(values, where, problems)) is not None]
    names = [hook.name for hook in webhooks]
    if len(set(names)) != len(names):
        problems.append(f"{source}: two [[webhook]] have the same url; merge them into one with all the kinds")
    return tuple(webhooks)


def _webhook(values: Mapping[str, Any], where: str, problems: list[str]) -> Webhook | None:
    if "url" not in values:
        problems.append(f"{where} has no url")
        return None
    if "secret" in values and "secret_file" in values:
        problems.append(f"{where} has both secret and secret_file; give one")
    rest = {key: value for key, value in values.items() if key != "secret_file"}
    return Webhook(**{"secret": values.get("secret_file"), **rest})


def _read_secret(value: object) -> bytes:
    """Return a key: decoded from base64 after `whsec_`, else the text itself."""
    text = read_text(value)
    if not text.startswith(PREFIX):
        return text.encode()
    try:
        return base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except binascii.Error as exc:
        raise ValueError(f"is not base64 after {PREFIX}") from exc


def _read_hidden(value: object) -> bytes:
    """Return a key that is written in the configuration itself."""
    try:
        return _read_secret(value)
    except ValueError as exc:  # a message made from a ConfigError does not contain the value
        raise ConfigError(f"this {exc}") from exc


def _read_secret_file(value: object) -> bytes:
    path = Path(read_text(value)).expanduser()
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    if not text:
        raise ValueError("is empty")
    return _read_secret(text)


def _read_kinds(value: object) -> frozenset[str]:
    if not isinstance(value, list) or not value or not all(isinstance(kind, str) and kind for kind in value):
        raise ValueError('is not a list of kinds; write ["nan", "hang"]')
    return frozenset(value)


def _read_labels(value: object) -> dict[str, str]:
    labels = read_texts(value)
    if bad := [name for name in labels if not _LABEL.match(name)]:
        raise ValueError(f"has a label that is not a valid name: {bad[0]}")
    return labels


_READERS = {
    "url": read_url,
    "secret": _read_hidden,
    "secret_file": _read_secret_file,
    "kinds": _read_kinds,
    "labels": _read_labels,
}
