"""Compare odd trainings with hookd and without it, also without pytest: `python -m tests.support.odd [NAME...]`."""

import sys
import traceback

from tests.support.harm import KINDS, harm
from tests.support.odd import TABLE


def main() -> int:
    found = 0
    for name in sys.argv[1:] or TABLE:
        for kind in KINDS:
            try:
                text = harm(TABLE[name], kind)
            except Exception:  # noqa: BLE001 - the others are to be run as well
                text = traceback.format_exc()
            found += bool(text)
            print(f"{name} {kind}: {text or 'the same'}", flush=True)
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
