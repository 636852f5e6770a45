"""Deduplicate incidents that are equal apart from numbers."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hookd.wire.incident import Incident

DISTINCT = frozenset({"eval", "training_changed"})
"""Kinds that record what a person did to a training. Such incidents are never equal, even if only their numbers differ."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:[eE][+-]?\d+)?")


def same(incident: Mapping[str, Any]) -> str:
    """Return the key that equal incidents of one process share.

    Two incidents are equal if their kinds, modules and messages are, apart from numbers in the message (a step, a loss, seconds).
    An incident that the daemon itself has seen (its `seq` is negative), or of a kind in DISTINCT, has its `seq` as its key, so
    it is never collapsed.
    """
    seq = incident.get("seq")
    if isinstance(seq, int) and (seq < 0 or incident.get("kind") in DISTINCT):
        return f"#{seq}"
    words = (str(incident.get("kind", "")), str(incident.get("module") or ""), str(incident.get("message", "")))
    text = "\0".join((*words[:2], _NUMBER.sub("0", words[2])))
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()


def collapse(incidents: Iterable[Incident]) -> list[Incident]:
    """Return the first of each group of equal incidents of one process.

    It has the `count` of the group, and the time of the `last` one.
    """
    firsts: dict[str, Incident] = {}
    for incident in incidents:
        first = firsts.setdefault(same(incident), {**incident, "count": 0})
        first["count"] += 1
        first["last"] = incident["time"]
    return list(firsts.values())
