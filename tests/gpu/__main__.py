"""Measure hookd on a GPU, write the tables of docs/gpu.md, and the figures as JSON.

    python -m tests.gpu [--dry] [--only PART]... [--out FILE.json] [--document FILE]

Each part runs in a process of its own with a limit of time, so that a device that hangs in one leaves the others. With `--dry` all parts are
made on the processor, with tiny models, and the document is not written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch

from tests.gpu.place import ROOT, Place, Table, described

PARTS = {"suite": 900.0, "identity": 1200.0, "cost": 900.0, "seconds": 120.0, "faults": 400.0, "peers": 600.0}
"""The parts, and the seconds that each may take."""
BEGIN, END = "<!-- begin gpu -->\n", "<!-- end gpu -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "gpu.md")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.dry and not torch.cuda.is_available():
        print("There is no GPU here; --dry does the same on the processor.", file=sys.stderr)
        return 2
    if given.part:
        with tempfile.TemporaryDirectory(prefix="hookd-gpu-") as scratch:
            print(json.dumps(asdict(import_module(f"tests.gpu.{given.part}").part(Place(given.dry, Path(scratch))))))
        return 0
    found = {name: _run(name, is_dry=given.dry) for name in given.only or PARTS}
    given.out.write_text(
        json.dumps({"machine": described(), "parts": {name: asdict(table) for name, table in found.items()}}, indent=1)
    )
    text = _markdown(found)
    if given.dry:
        print(text)
    else:
        _write(given.document, text)
    failures = [failure for table in found.values() for failure in table.failures]
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


def _run(name: str, *, is_dry: bool) -> Table:
    """Run one part in a process of its own."""
    began = time.monotonic()
    words = [sys.executable, "-m", "tests.gpu", "--part", name, *(["--dry"] if is_dry else [])]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if is_dry:
        environment["OMP_NUM_THREADS"] = "1"  # tiny models: threads of a busy machine wait for each other
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            made, _ = process.communicate(timeout=PARTS[name])
            table = Table(**json.loads(made.splitlines()[-1]))
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            table = Table(name, "", ("",), failures=[f"{name} (exit code {process.poll()}): {error}"])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
    print(f"{time.monotonic() - began:6.1f} s  {name}: {len(table.failures)} failures", file=sys.stderr, flush=True)
    return table


def _markdown(tables: dict[str, Table]) -> str:
    about = ", ".join(f"{name} {value}" for name, value in described().items())
    lines = [f"Written by `make gpu` on {time.strftime('%Y-%m-%d')}: {about}.", ""]
    for table in tables.values():
        lines += [f"### {table.title}", "", table.text, ""]
        if table.rows:
            lines += ["| " + " | ".join(table.head) + " |", "|" + " --- |" * len(table.head)]
            lines += [
                "| " + " | ".join(cell.replace("|", "&#124;").replace("\n", " ") for cell in row) + " |"
                for row in table.rows
            ] + [""]
        lines += [f"- {failure.splitlines()[0]}" for failure in table.failures] + ([""] if table.failures else [])
    return "\n".join(lines)


def _write(document: Path, text: str) -> None:
    """Replace what is between the marks, or append it."""
    before = document.read_text()
    if BEGIN not in before:
        before += f"\n## Measured\n\n{BEGIN}{END}"
    head, _, rest = before.partition(BEGIN)
    document.write_text(head + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
