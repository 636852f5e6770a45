"""Attack hookd as unprivileged users, targets, network peers and plugin authors would, and write the table in docs/security.md.

    python -m tests.attacks [--short] [--only NAME]... [--out FILE] [--list]

As root. Everything happens in mount, pid and network namespaces of its own, on loopback, and ends by itself. Rows of
attacks that are not made stay as they are. Exits with 1 if an attack got through.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from tests.attacks import table
from tests.attacks.attack import ATTACKS, NOT_MADE, Attack, Impossible, Result
from tests.attacks.people import admit
from tests.support.environment import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterable

CHAPTERS = (
    "injection",
    "descriptors",
    "unanswered",
    "authors",
    "floods",
    "fairness",
    "daemons",
    "accidents",
    "network",
)
"""The modules that register attacks, in the order of the table."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
_APART = ("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
_INSIDE = "--inside"
SHORT_S, FULL_S = 140, 3600
"""How long one attack may take."""


def load() -> dict[str, Attack]:
    """Return all attacks by name, in the order of the table.

    Raises:
        ModuleNotFoundError: a package that the tests need is not installed.
    """
    for chapter in CHAPTERS:
        importlib.import_module(f"tests.attacks.{chapter}")
    return ATTACKS


def listed(attacks: Iterable[Attack]) -> str:
    """Return a line for each attack, in columns."""
    rows = [(one.name, one.actor, one.title) for one in attacks]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)


def main() -> int:
    try:
        attacks = load()
    except ModuleNotFoundError as exc:
        print(
            f"the attacks need {exc.name}, which is not installed in {sys.prefix}: `make attacks` installs it in .venv; "
            "after that, .venv/bin/python -m tests.attacks",
            file=sys.stderr,
        )
        return 2
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer tries, as in the tests")
    parser.add_argument("--only", action="append", choices=sorted(attacks), metavar="NAME")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    parser.add_argument("--list", action="store_true", help="name the attacks, and make none")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        print(listed(attacks.values()))
        return 0
    if os.geteuid() != 0:
        parser.error("the attacks need root: they are made as several users, in namespaces of their own")
    if not arguments.inside:
        command = [*_APART, sys.executable, "-m", "tests.attacks", _INSIDE, *sys.argv[1:]]
        return subprocess.run(command, cwd=DOCUMENT.parents[1], check=False).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    admit(Path(sys.base_prefix).resolve(), REPOSITORY)  # attackers run Python too, and both may be root's own
    signal.signal(signal.SIGALRM, _is_late)
    results = [_make(attacks[name], short=arguments.short) for name in arguments.only or attacks]
    table.write(arguments.out, results, attacks.values())
    return int(any(result.succeeded for _, result in results))


def _is_late(*_: object) -> None:
    raise TimeoutError("it took too long")


def _make(one: Attack, *, short: bool) -> tuple[Attack, Result]:
    begun = time.monotonic()
    signal.alarm(SHORT_S if short else FULL_S)
    try:
        result = one.play(one.short if short else one.tries)
    except Impossible as exc:
        result = Result(0, 0, f"{NOT_MADE}: {exc}")
    except Exception as exc:  # noqa: BLE001  an attack that was not made to its end has not been withstood
        traceback.print_exc()
        result = Result(1, 1, f"failed: {exc!r}")
    finally:
        signal.alarm(0)
    reported = f"{result.tries} tries, {result.succeeded} got through: {result.seen}"
    print(f"{time.monotonic() - begun:6.1f} s  {one.name}: {reported}", file=sys.stderr, flush=True)
    return one, result


if __name__ == "__main__":
    sys.exit(main())
