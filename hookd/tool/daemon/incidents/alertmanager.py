"""Incidents as the message that Alertmanager posts to its webhooks, so that whatever receives those receives ours.

Format: version 4, https://prometheus.io/docs/alerting/latest/configuration/#webhook_config, compared with what
Alertmanager 0.25 sends. An incident is an alert that fires and is not resolved.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from hookd.tool.daemon.incidents.incident_log import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NAME = "HookdIncident"
GROUPED_BY = ("alertname", "instance", "user", "run", "rank", "kind")
MAX_ALERTS = 20
"""Incidents of one message; the others are counted in `truncatedAlerts`."""
NEVER = "0001-01-01T00:00:00Z"
"""Go's zero time: the alert has not ended."""
_OFFSET, _PRIME, _SEPARATOR = 0xCBF29CE484222325, 0x100000001B3, b"\xff"  # FNV-1a, 64 bits


def message(
    incidents: Sequence[Mapping[str, Any]], *, instance: str, url: str, receiver: str, more: Mapping[str, str]
) -> bytes:
    """Write the message of incidents of one user, run, rank and kind: the first MAX_ALERTS, and how many more there were.

    Args:
        incidents: rows of the store, the oldest first.
        instance: the name of this machine.
        url: of this daemon.
        receiver: the name of who is told.
        more: labels beside our own.
    """
    alerts = [_alert(incident, instance, url, more) for incident in incidents[:MAX_ALERTS]]
    labels = _common([alert["labels"] for alert in alerts])
    group = {name: labels[name] for name in GROUPED_BY if name in labels}
    whole = {
        "receiver": receiver,
        "status": "firing",
        "alerts": alerts,
        "groupLabels": group,
        "commonLabels": labels,
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": url,
        "version": "4",
        "groupKey": "{}:{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in sorted(group.items())) + "}",
        "truncatedAlerts": len(incidents) - len(alerts),
    }
    return json.dumps(whole).encode()


def _alert(incident: Mapping[str, Any], instance: str, url: str, more: Mapping[str, str]) -> dict[str, Any]:
    labels = {"alertname": NAME, "instance": instance}
    labels |= {name: plain(incident[name]) for name in ("user", "run", "rank", "kind", "module") if incident[name]}
    labels |= more
    return {
        "status": "firing",
        "labels": labels,
        "annotations": _annotations(incident),
        "startsAt": _rfc3339(incident["time"]),
        "endsAt": NEVER,
        "generatorURL": url,
        "fingerprint": fingerprint(labels),
    }


def _annotations(incident: Mapping[str, Any]) -> dict[str, str]:
    what, number = plain(incident["message"]), incident["id"]
    told = {
        "summary": plain(f"{incident['kind']} in run {incident['run']}, rank {incident['rank']}: {what}"),
        "description": what,
        "pid": str(incident["pid"]),
    }
    if incident["count"] > 1:
        told |= {"count": str(incident["count"]), "last": _rfc3339(incident["last"])}
    if incident["step"] is not None:
        told["step"] = str(incident["step"])
    if number is not None:
        told |= {"incident": str(number), "command": f"hookd report '#{number}'"}
    return told


def fingerprint(labels: Mapping[str, str]) -> str:
    """Hash labels as Alertmanager does: equal labels are the same alert (prometheus/common, model/signature.go)."""
    parts = (text.encode() for item in sorted(labels.items()) for text in item)
    value = _OFFSET
    for part in parts:
        for byte in part + _SEPARATOR:
            value = ((value ^ byte) * _PRIME) & (1 << 64) - 1
    return f"{value:016x}"


def _common(tables: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Give what all have alike."""
    first, *others = tables
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in others)}


def _rfc3339(unix_s: float) -> str:
    try:
        moment = time.gmtime(unix_s)
    except (OverflowError, ValueError, OSError):  # the clock of a target may say anything
        return NEVER
    return time.strftime("%Y-%m-%dT%H:%M:%S", moment) + f".{int(unix_s % 1 * 1000):03}Z"
