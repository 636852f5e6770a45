"""Run the benches, and write their results into `docs/benchmarks.md`, each into a section of its own.

    python -m tests.bench [--only NAME]... [--quick] [--out FILE]

Each bench is a module with TITLE, a docstring that says how it measures, and `report(quick=...)`; it runs in a process of
its own. Sections of benches that are not run stay as they are. Exits with 1 if a bound does not hold. `--quick` takes
some minutes, shows roughly what the figures look like and, without `--out`, writes to stdout only.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from tests.bench import fresh
from tests.bench.document import Document, Machine

BENCHES = (
    "hot_path",
    "side_by_side",
    "claimed",
    "kernel_cost",
    "fingerprint",
    "timing_oracle",
    "agent_memory",
    "scrape",
    "fleet_cost",
    "scale",
)
DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=BENCHES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or (None if args.quick else DOCUMENT)
    document, missed = Document.read(out, BENCHES), []
    for name in args.only or BENCHES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        machine = Machine.now()
        bench = importlib.import_module(f"tests.bench.{name}")
        found = fresh.run(bench.report, quick=args.quick)
        document.put(name, bench.TITLE, bench.__doc__, machine.provenance(name, quick=args.quick), found)
        if out is not None:
            document.write(out)
        missed += [
            f"{name}: {bound.text}: {bound.measured:.3f} > {bound.limit:g}" for bound in found.bounds if not bound.holds
        ]
    if out is None:
        sys.stdout.write(document.markdown())
    print("\n".join(missed), file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
