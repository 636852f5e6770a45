"""Equal incidents are one: by which key, and how a list of them becomes shorter. Runs on both sides, stdlib only."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DISTINCT = frozenset({"eval", "training_changed"})
"""Kinds whose incidents are the record of what a person did to a training: one with other numbers is another one."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:[eE][+-]?\d+)?")


def same(incident: Mapping[str, Any]) -> str:
    """Return the key that equal incidents of one process share.

    Equal are kind, module and message, where numbers (a step, a loss, seconds) do not count. The key of an incident that the
    daemon itself has seen, which has a number below 0, or of a kind in DISTINCT is its number: it is never collapsed.
    """
    seq = incident.get("seq")
    if isinstance(seq, int) and (seq < 0 or incident.get("kind") in DISTINCT):
        return f"#{seq}"
    words = (str(incident.get("kind", "")), str(incident.get("module") or ""), str(incident.get("message", "")))
    text = "\0".join((*words[:2], _NUMBER.sub("0", words[2])))
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()


def collapse(incidents: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the first of equal incidents of one process, each with its `count` and the time of the `last`."""
    found: dict[str, dict[str, Any]] = {}
    for incident in incidents:
        first = found.setdefault(same(incident), {**incident, "count": 0})
        first["count"] += 1
        first["last"] = incident.get("time")
    return list(found.values())
