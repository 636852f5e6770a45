"""Run torch's own tests without hookd and with all observers at every step, and compare the outcomes test by test.

    python -m tests.torch_tests [--root DIR] [--sources DIR] [--only PATTERN]... [--all] [--mode MODE]... [--json FILE] [--out FILE]

Each file runs in a process of its own: plainly, with `hookd.start()` before the tests, under `hookd run`, and while
`hookd attach` comes and goes; where an outcome differs, plainly once more: what differs then is not hookd's doing. A root that is not / is
entered in a mount namespace of its own, as root; it needs Debian's torch and pytest. Without --sources, Debian's source
package of the root's torch is fetched.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from pathlib import Path

from tests.support.environment import REPOSITORY
from tests.torch_tests import document, place, sources
from tests.torch_tests.files import FILES, SLOW
from tests.torch_tests.program import AGAIN, MODES, Program
from tests.torch_tests.runs import run

DOCUMENT = REPOSITORY / "docs" / "torch-tests.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=place.HERE, help="of the file system whose torch is tested")
    parser.add_argument("--sources", type=Path, help="torch's sources of exactly that version, unpacked")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="files below test/, with * and ?")
    parser.add_argument("--all", action="store_true", help="also the files that take long")
    parser.add_argument("--mode", action="append", choices=MODES, help="default: all")
    parser.add_argument("--limit", type=float, default=900, metavar="S", help="for one file in one mode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every outcome and the text of every failure")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torch-tests-", dir="/tmp", ignore_cleanup_errors=True) as work:
        where = place.at(arguments.root, Path(work))
        versions = where.versions()
        tree = Path(work, "sources")
        sources.copy(arguments.sources, tree) if arguments.sources else sources.fetch(where, tree)
        results = _run(Program(where, tree / "test"), _chosen(tree / "test", arguments), arguments)
    document.write(arguments.out, results, versions)
    return 1 if document.differences(results) else 0


def _chosen(tests: Path, arguments: argparse.Namespace) -> list[str]:
    known = FILES + (SLOW if arguments.all or arguments.only else ())
    found = (path.relative_to(tests).as_posix() for pattern in known for path in sorted(tests.glob(pattern)))
    return [
        file for file in dict.fromkeys(found)
        if any(fnmatch.fnmatchcase(file, pattern) for pattern in arguments.only or ("*",))
    ]  # fmt: skip


def _run(program: Program, files: list[str], arguments: argparse.Namespace) -> document.Results:
    results: document.Results = {}
    for file in files:
        results[file] = {}
        for mode in [*(arguments.mode or MODES), AGAIN]:
            if mode == AGAIN and not document.has_other_outcomes(results[file]):
                continue
            one = results[file][mode] = run(program, file, mode, arguments.limit)
            _say(f"{one.seconds:6.1f} s  {file}  {mode}: {document.counted(one)}")
        for line in document.differences({file: results[file]}):
            _say(f"          {document.short(line)}")
        if arguments.json:
            document.keep(arguments.json, results)
    return results


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
