"""The status page at `/`: plain HTML, no script. Every value is escaped: names and messages are the targets' own."""

from __future__ import annotations

import base64
import hashlib
import time
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #1c2733; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .35em .8em .35em 0; }
th { color: #5b6b7b; font-weight: 600; border-bottom: 1px solid #cfd8e0; } td { border-bottom: 1px solid #edf1f4; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } .attached { color: #19703e; }
.lost, .corrupt { color: #b3261e; } .detached, .quiet { color: #5b6b7b; } a { color: #1558a8; }
@media (prefers-color-scheme: dark) {
  body { background: #14191f; color: #dbe3ea; } a { color: #7db4f5; } th, td { border-color: #2b3540; }
  .attached { color: #67c98d; } .lost, .corrupt { color: #f28b82; }
}
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""The Content-Security-Policy under which the page works: our own style, and nothing else."""
REFRESH_S = 10


def status_page(status: Mapping[str, Any], incidents: Iterable[Mapping[str, Any]]) -> str:
    """Write the page.

    Args:
        status: as `Service.status` gives it.
        incidents: the last ones, as the store gives them.
    """
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>hookd</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{REFRESH_S}"><style>{_STYLE}</style></head><body>
<h1>hookd {escape(str(status["version"]))}</h1>
<p class="quiet">pid {status["pid"]}, since {_moment(status["started"])} &middot; <a href="/metrics">metrics</a> &middot;
<a href="/api/v1/targets">targets (JSON)</a> &middot; <a href="/api/v1/incidents">incidents (JSON)</a></p>
<h2>Targets</h2>
{_targets(status["targets"])}
<h2>Last incidents</h2>
{_incidents(list(incidents))}
</body></html>
"""


def _targets(rows: list[Mapping[str, Any]]) -> str:
    if not rows:
        return '<p class="quiet">None. <code>hookd attach PID</code> makes one, <code>hookd ps</code> lists candidates.</p>'
    head = "".join(
        f"<th{_kind(name)}>{name}</th>" for name in ("pid", "run", "rank", "state", "step", "last event", "script")
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_target, rows))}</tbody></table>"


def _target(row: Mapping[str, Any]) -> str:
    age, step = row["heartbeat_age_s"], row["step"]
    state = row["state"] if row["reason"] in (None, row["state"]) else f"{row['state']}: {row['reason']}"
    if row.get("hang"):
        state = f"hangs {row['hang']['where']}"
    state = ", ".join([state, *(kind for kind in row["ongoing"] if kind not in ("hang", row["state"]))])
    return (
        f'<tr><td class="n">{row["pid"]}</td><td>{escape(row["run"])}</td><td class="n">{escape(row["rank"])}</td>'
        f'<td class="{escape(row["state"])}">{escape(state)}</td>'
        f"<td>{escape(step['text']) if step else ''}</td>"
        f'<td class="n">{"" if age is None else f"{age:.0f} s ago"}</td><td>{escape(row["script"])}</td></tr>'
    )


def _incidents(rows: list[Mapping[str, Any]]) -> str:
    if not rows:
        return '<p class="quiet">None.</p>'
    head = "".join(f"<th>{name}</th>" for name in ("when", "run", "rank", "kind", "module", "what"))
    body = "".join(
        f"<tr><td>{_moment(row['time'])}</td>"
        + "".join(f"<td>{escape(str(row[key] or ''))}</td>" for key in ("run", "rank", "kind", "module", "message"))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _kind(name: str) -> str:
    return ' class="n"' if name in ("pid", "rank", "last event") else ""


def _moment(unix_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):  # the clock of a target may say anything
        return ""
