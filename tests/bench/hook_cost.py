"""The cost of a call of each hook with a plugin that does nothing in it: with no arguments, and with all of them.

    python -m tests.bench.hook_cost [--pairs N] [HOOK...]

Blocks of steps alternate with and without the plugin (`hookd.testing.overhead`), CPU time of one thread:
200 small modules for hooks that are called for each module, five for hooks that are called once a step.
The difference is divided by the calls of the hook in a step, after the overhead of hookd itself is
subtracted. Prints one JSON object per hook: ns per call,
the median with its 95 % bounds. The cost classes in `hookd/api/hookspecs` come from here.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json

from hookd import Plugin, hookimpl
from hookd.api import hookspecs
from hookd.testing import FakeTarget, many_modules, overhead, small
from hookd.testing.pairs import enough

HOOKS = tuple(
    name for name in hookspecs.__all__ if name in hookspecs.HOT - {"mode", "closure_done", "forward_error", "suspect"}
)

PER_MODULE = {"forward_pre", "forward", "forwards", "backward_pre", "backward", "param_grad"}


def empty(hook: str, arguments: list[str]) -> type[Plugin]:
    space: dict = {}
    exec(f"def {hook}(self, {', '.join(arguments)}): pass", space)
    return type("Empty", (Plugin,), {"name": "empty", hook: hookimpl(space[hook])})


def calls_in_a_step(plugin: type[Plugin], make) -> float:
    with FakeTarget(make=make) as target:
        target.start(plugin)
        target.run_steps(1)
        before = len(target.events)
        target.run_steps(4)
        return (len(target.events) - before) / 4


@functools.cache
def base(make, steps: int, pairs: int) -> float:
    """Return what hookd itself adds to a block when a plugin has no hook but `tick`."""
    return overhead((empty("tick", []),), make=make, pairs=pairs, steps=steps).added.value


def measure(hook: str, pairs: int) -> dict[str, object]:
    make, steps = (many_modules, 2) if hook in PER_MODULE else (small, 20)
    reported: dict[str, object] = {"hook": hook}
    every = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    for kind, arguments in (("none", []), ("all", every)):
        plugin = empty(hook, arguments)
        events = calls_in_a_step(plugin, make)
        added = overhead((plugin,), make=make, pairs=pairs, steps=steps).added
        alone = base(make, steps, pairs)
        figures = [round((one - alone) / events / steps) for one in (added.value, added.low, added.high)]
        reported |= {"calls_per_step": events, kind: figures}
    return reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hooks", nargs="*", default=HOOKS)
    parser.add_argument("--pairs", type=enough, default=40)
    args = parser.parse_args()
    for hook in args.hooks:
        print(json.dumps(measure(hook, args.pairs)), flush=True)


if __name__ == "__main__":
    main()
