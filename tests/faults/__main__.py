"""Make every fault for real, and write hookd's messages into the table in docs/reliability.md.

    python -m tests.faults [--only NAME]... [--out FILE] [--list]

Each fault has processes, a daemon and a directory of its own, and takes at most about half a minute. Rows of faults that
are not made stay as they are. As root all faults can be made; as another user those that need a mount, a cgroup or a
container are reported as not made. No other target of hookd may run on this machine meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from tests.faults import document, scene

CHAPTERS = ("silence", "ends", "guests", "daemons")
"""The modules that register faults, in the order of the table."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"


def main() -> int:
    for chapter in CHAPTERS:
        importlib.import_module(f"tests.faults.{chapter}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(scene.FAULTS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    parser.add_argument("--list", action="store_true", help="name the faults, and make none")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{one.name:18}{one.title}" for one in scene.FAULTS.values()))
        return 0
    played = []
    for name in arguments.only or scene.FAULTS:
        one, begun = scene.FAULTS[name], time.monotonic()
        played.append((one, scene.run(one)))
        print(f"{time.monotonic() - begun:5.1f} s  {name}: {played[-1][1].words}", file=sys.stderr, flush=True)
        document.write(arguments.out, played, scene.FAULTS.values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
