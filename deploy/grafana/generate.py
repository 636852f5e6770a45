"""Make the dashboards for Grafana.

    python deploy/grafana/generate.py [DIRECTORY]

writes hookd-*.json beside this file, or into another directory. It needs grafana-foundation-sdk (Python 3.11; the group `dev`
brings the version that is right). To be run after a change of these files, and `deploy/kubernetes/generate.py` after it where
there is a new dashboard; a test compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fleet import fleet
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from health import health
from module import module
from ranks import ranks
from run import run

DASHBOARDS = (fleet, run, ranks, module, health)
_OF_INTERVALS = ("auto", "auto_min", "auto_count")
"""What the SDK gives all variables, and Grafana those of intervals alone."""


def plain(dashboard: Any) -> dict[str, Any]:
    """Return a dashboard as Grafana reads it, with a number for each panel: Grafana would give it one at every load."""
    made = json.loads(JSONEncoder().encode(dashboard.build()))
    inside = [panel for row in made["panels"] for panel in row.get("panels") or ()]
    for number, panel in enumerate([*made["panels"], *inside], 1):
        panel["id"] = number
    for one in (*made["links"], *made["annotations"].get("list", ())):
        del one["placement"]  # the SDK hides all of them in a menu, which only the newest Grafana has
    for variable in made["templating"]["list"]:
        for option in _OF_INTERVALS:
            del variable[option]
    return made


def main() -> None:
    """Write the files."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for dashboard in DASHBOARDS:
        made = plain(dashboard())
        path = directory / f"{made['uid']}.json"
        path.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
        sys.stderr.write(f"wrote {path.name}\n")


if __name__ == "__main__":
    main()
