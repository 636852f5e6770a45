"""Load one plugin, train with it, and tell what it did and what it cost: what `hookd plugin check` and `bench` run.

    python -m hookd.testing.measure '{"entry": "hookd_widths:Widths", "directory": "/src", "what": "check", "out": "FILE"}'

Runs in a process of its own, in an environment that has torch. It writes one JSON object into `out`.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
import traceback
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd import hookspecs
from hookd.errors import PluginError, worded
from hookd.testing.cost import overhead
from hookd.testing.equality import first_difference
from hookd.testing.events import wrapped
from hookd.testing.target import FakeTarget
from hookd.testing.training import many_modules, small, transformer_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.plugin import Plugin
    from hookd.testing.pairs import Estimate

STEPS, BENCH_STEPS, BENCH_PAIRS = 10, 20, 40
MODELS = {"200 small modules": many_modules, "a transformer block": transformer_block}


class Probe:
    """Notes what a plugin does: time and memory of each hook, what it declares, raises and returns.

    Args:
        directory: of the plugin's sources: lines in it are the author's.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.took: dict[str, list[int]] = {}
        self.memory: dict[str, list[tuple[int, int]]] = {}
        self.raised: dict[tuple[str, int], dict[str, Any]] = {}
        self.metrics: list[dict[str, Any]] = []
        self.counts_memory = False
        self._nothing = _cost_of_the_clock()

    def around(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make the hook that is called in place of the author's."""

        def call(plugin: Plugin, *values: Any) -> Any:
            if hook == "configure":
                self._watch(values[0])
            begun, memory = time.perf_counter_ns(), self._memory()
            try:
                result = function(plugin, *values)
            except Exception as error:
                self._note(hook, error)
                raise
            self._spent(hook, time.perf_counter_ns() - begun, memory)
            return result

        return call

    def _spent(self, hook: str, elapsed_ns: int, memory: int) -> None:
        if self.counts_memory:
            kept, peak = tracemalloc.get_traced_memory()
            self.memory.setdefault(hook, []).append((max(0, peak - memory), kept - memory))
        else:
            self.took.setdefault(hook, []).append(max(0, elapsed_ns - self._nothing))

    def _memory(self) -> int:
        if not self.counts_memory:
            return 0
        tracemalloc.reset_peak()
        return tracemalloc.get_traced_memory()[0]

    def _note(self, hook: str, error: Exception) -> None:
        mine = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(self._directory)]
        file, line = (mine[-1].filename, mine[-1].lineno or 0) if mine else ("", 0)
        what = worded(error)
        self.raised.setdefault((file, line), {"hook": hook, "error": what, "file": file, "line": line})

    def _watch(self, context: Any) -> None:
        """Have the context tell what is declared, and on which line."""
        declare = context._declare  # noqa: SLF001

        def noted(metric: Any) -> Any:
            frame: Any = sys._getframe(1)  # noqa: SLF001
            while frame is not None and not frame.f_code.co_filename.startswith(self._directory):
                frame = frame.f_back
            file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
            told = {"kind": metric.kind, "name": metric.name, "labels": list(metric.label_names)}
            self.metrics.append({**told, "file": file, "line": line})
            return declare(metric)

        context._declare = noted  # noqa: SLF001

    def hooks(self) -> dict[str, Any]:
        """Give calls and ns per call of each hook, with the middle half."""
        return {
            hook: {"calls": len(took), **_spread(took)} for hook, took in self.took.items() if hook in hookspecs.HOT
        }


def _cost_of_the_clock() -> int:
    took = []
    for _ in range(200):
        begun = time.perf_counter_ns()
        took.append(time.perf_counter_ns() - begun)
    return int(statistics.median(took))


def _spread(took: list[int]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(took, n=4, method="inclusive") if len(took) > 1 else took * 3
    return {"ns": middle, "low_ns": low, "high_ns": high}


def check(plugin: type[Plugin], directory: str, options: dict[str, object]) -> dict[str, Any]:
    """Train some steps with a plugin, call every cold hook, and compare a training with it and without it, bit for bit."""
    probe = Probe(directory)
    with FakeTarget(record=False) as target:
        target.start(wrapped(plugin, probe.around), **options)
        broken = _worked(target, plugin.name, options)
        state, mutates = target.state(plugin.name), target.plugin(plugin.name).mutates
        errors, logs = target.errors, target.logs
    told = {"hooks": probe.hooks(), "metrics": probe.metrics, "raised": list(probe.raised.values()), "state": state,
            "errors": sum(errors.values()), "logs": logs, "mutates": mutates, "broken": broken}  # fmt: skip
    is_sound = not errors and not mutates and not broken
    return {**told, "difference": first_difference((plugin,), make=small, options=options) if is_sound else ""}


def _worked(target: FakeTarget, name: str, options: dict[str, object]) -> str:
    """Train, evaluate, change the options and train on; give what the training has raised, "" if nothing."""
    try:
        target.run_steps(STEPS)
        target.training.model.eval()
        target.tick()
        target.configure(name, **options)
        target.run_steps(STEPS)
    except PluginError:
        raise
    except Exception as error:  # noqa: BLE001  (torch's, of what the plugin did to its tensors)
        return worded(error)
    return ""


def bench(plugin: type[Plugin], directory: str, options: dict[str, object]) -> dict[str, Any]:
    """Measure each hook by itself, and a step with the plugin beside one without it, on two models."""
    return {"models": {name: _on(make, plugin, directory, options) for name, make in MODELS.items()}}


def _on(make: Callable[[], Any], plugin: type[Plugin], directory: str, options: dict[str, object]) -> dict[str, Any]:
    probe = Probe(directory)
    with FakeTarget(record=False, make=make) as target:
        target.start(wrapped(plugin, probe.around), **options)
        target.run_steps(BENCH_STEPS)
        probe.counts_memory = True
        tracemalloc.start()
        try:
            target.run_steps(3)
        finally:
            tracemalloc.stop()
    hooks = probe.hooks()
    for hook, told in hooks.items():
        sizes = probe.memory.get(hook, [(0, 0)])
        told["peak_bytes"] = statistics.median(peak for peak, _ in sizes)
        told["kept_bytes"] = statistics.median(kept for _, kept in sizes)
    pairs = overhead((plugin,), make=make, pairs=BENCH_PAIRS, options=options)
    return {"hooks": hooks, "ratio": _told(pairs.ratio), "control": _told(pairs.control)}


def _told(one: Estimate) -> dict[str, float]:
    return {"median": one.value, "low": one.low, "high": one.high}


def main() -> None:
    """Do what the only argument says."""
    request = json.loads(sys.argv[1])
    sys.path.insert(0, request["directory"])
    module, _, name = request["entry"].partition(":")
    what = {"check": check, "bench": bench}[request["what"]]
    try:
        plugin = getattr(importlib.import_module(module), name)
        told = what(plugin, request["directory"], request["options"])
    except PluginError as error:
        told = {"refused": error.message, "hint": error.hint}
    except Exception as error:  # noqa: BLE001  (of the author's import, say: it is for the author to read)
        told = {
            "refused": "".join(traceback.format_exception_only(type(error), error)).strip(),
            "hint": traceback.format_exc(),
        }
    Path(request["out"]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
