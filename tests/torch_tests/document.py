"""The table of docs/torch-tests.md, between two marks; the text around it is written by hand."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from hookd.version import __version__
from tests.torch_tests.program import AGAIN, MODES, PLAIN
from tests.torch_tests.runs import Result

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Results = dict[str, dict[str, Result]]
"""By file and mode."""
ORDER = ("passed", "failed", "error", "skipped", "xfailed", "xpassed", "timed out")


def counted(result: Result) -> str:
    """Return how many tests had which outcome, as `12 passed, 1 skipped`."""
    counts = Counter(result.outcomes.values())
    names = [*(name for name in ORDER if name in counts), *sorted(counts.keys() - set(ORDER))]
    return ", ".join(f"{counts[name]} {name}" for name in names) or "no tests"


def differences(results: Results) -> list[str]:
    """Return a line for each test with another outcome than without hookd, and for each finding about hookd itself."""
    return [line for file, modes in results.items() for line in _differences(file, modes)]


def has_other_outcomes(modes: dict[str, Result]) -> bool:
    """Whether a test of a file has another outcome in any mode than plainly."""
    return PLAIN in modes and any(one.outcomes != modes[PLAIN].outcomes for one in modes.values())


def _differences(file: str, modes: dict[str, Result]) -> Iterator[str]:
    plain, again = modes.get(PLAIN, Result()).outcomes, modes.get(AGAIN, Result()).outcomes
    for mode, result in modes.items():
        if mode == PLAIN:
            continue
        for name in sorted({*plain, *result.outcomes}):
            was, now = plain.get(name, "absent"), result.outcomes.get(name, "absent")
            if was != now and (mode == AGAIN or again.get(name, was) == was):
                yield f"{mode}: {name}: {was}, then {now}"
        yield from (f"{mode}: {file}: {finding}" for finding in dict.fromkeys(result.findings))
        for name in set(result.changed) - set(modes.get(PLAIN, result).changed):
            yield f"{mode}: {file}: {name} is another object afterwards"


def keep(path: Path, results: Results) -> None:
    """Write everything as JSON."""
    everything = {file: {mode: asdict(one) for mode, one in modes.items()} for file, modes in results.items()}
    path.write_text(json.dumps({"results": everything, "differences": differences(results)}, indent=1))


def write(path: Path, results: Results, versions: tuple[str, str]) -> None:
    """Replace the table of one pair of versions in the file, or append it."""
    python, torch = versions
    begin, end = f"<!-- begin torch {torch} -->\n", f"<!-- end torch {torch} -->\n"
    text = path.read_text() if path.exists() else ""
    if begin not in text:
        text += f"\n{begin}{end}"
    before, _, rest = text.partition(begin)
    _, _, behind = rest.partition(end)
    path.write_text(f"{before}{begin}{_section(results, python, torch)}{end}{behind}")


def _section(results: Results, python: str, torch: str) -> str:
    modes = [mode for mode in MODES if any(mode in one for one in results.values())]
    head = f"| File | {' | '.join(modes)} | forward calls seen |\n|---|{'---|' * len(modes)}---|\n"
    rows = "".join(_row(file, one, modes) for file, one in results.items())
    found = "".join(f"- {line}\n" for line in map(short, differences(results))) or "- none\n"
    return f"{_provenance(python, torch)}\n\n{head}{rows}{_total(results, modes)}\nDifferences:\n\n{found}"


def _row(file: str, one: dict[str, Result], modes: list[str]) -> str:
    plain = counted(one[PLAIN]) if PLAIN in one else ""
    cells = [plain if mode == PLAIN else _compared(one, mode, plain) for mode in modes]
    seen = ", ".join(f"{one[mode].seen.get('forward calls', 0):,}" for mode in modes if mode != PLAIN and mode in one)
    return f"| {file} | {' | '.join(cells)} | {seen} |\n"


def _compared(one: dict[str, Result], mode: str, plain: str) -> str:
    if mode not in one:
        return ""
    now = counted(one[mode])
    return "the same" if now == plain else now


def _total(results: Results, modes: list[str]) -> str:
    cells = []
    for mode in modes:
        tests = sum(len(one[mode].outcomes) for one in results.values() if mode in one)
        seconds = sum(one[mode].seconds for one in results.values() if mode in one)
        cells.append(f"{tests:,} tests, {seconds:.0f} s")
    return f"| all | {' | '.join(cells)} | |\n"


def short(line: str) -> str:
    """Return the first line of a difference, cut where it is very long."""
    first = line.strip().splitlines()[0]
    return first if len(first) < 300 else first[:299] + "…"


def _provenance(python: str, torch: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        f"Written on {when} by `make torch-tests`: hookd {__version__}, CPython {python}, torch {torch}, Linux "
        f"{platform.release()}, {os.cpu_count()} cores."
    )
