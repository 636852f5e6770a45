"""Load plugins, train with each, and tell what it did and what it cost: what `hookd plugin check` and `bench` run.

    python -m hookd.testing.measure '{"what": "check", "options": {}, "plugins": [{"entry": "hookd_widths:Widths",
        "directory": "/src", "out": "FILE"}]}'

Runs in a process of its own, in an environment that has torch. It writes one JSON object into each `out`.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
import traceback
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hookd.api import hookspecs
from hookd.errors import PluginError, worded
from hookd.testing.cost import overhead
from hookd.testing.equality import first_difference
from hookd.testing.events import hooks_of, wrapped
from hookd.testing.target import FakeTarget
from hookd.testing.training import many_modules, small, transformer_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.plugin import Plugin
    from hookd.testing.pairs import Estimate
    from hookd.testing.training import Training

STEPS, BENCH_STEPS, BENCH_PAIRS = 10, 20, 40
OF_MODULES = {"forward_pre", "forward", "forwards", "backward_pre", "backward"}
MODELS: dict[str, Callable[[], Training]] = {
    "200 small modules": many_modules,
    "a transformer block": transformer_block,
}


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
        place = _place(error, self._directory)
        what = worded(error)
        self.raised.setdefault((place["file"], place["line"]), {"hook": hook, "error": what, **place})

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


def _place(error: BaseException, directory: str) -> dict[str, Any]:
    """Find the author's innermost line; "" and 0 where there is none."""
    mine = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(directory)]
    return {"file": mine[-1].filename, "line": mine[-1].lineno or 0} if mine else {"file": "", "line": 0}


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
    """Train some steps with a plugin, call every cold hook, and compare a training with it and without it, bit for bit.

    Hooks that a chain of small layers has no call for get a transformer block as well.
    """
    probe = Probe(directory)
    wanted = OF_MODULES & hooks_of(plugin).keys()
    for make in (small, lambda: transformer_block(32, 16)):
        told = _trained_with(plugin, make, probe, options)
        uncalled = sorted(wanted - probe.took.keys() - {one["hook"] for one in probe.raised.values()})
        if not uncalled or told["errors"] or told["broken"] or told["difference"]:
            break
    return {
        **told,
        "hooks": probe.hooks(),
        "metrics": probe.metrics,
        "raised": list(probe.raised.values()),
        "uncalled": uncalled,
    }


def _trained_with(
    plugin: type[Plugin], make: Callable[[], Training], probe: Probe, options: dict[str, object]
) -> dict[str, Any]:
    with FakeTarget(record=False, make=make) as target:
        target.start(wrapped(plugin, probe.around), **options)
        broken = _worked(target, plugin.name)
        state, mutates = target.state(plugin.name), target.plugin(plugin.name).mutates
        errors, logs = target.errors, target.logs
    told = {"state": state, "errors": sum(errors.values()), "logs": logs, "mutates": mutates, "broken": broken}
    is_sound = not errors and not mutates and not broken
    return {**told, "difference": first_difference((plugin,), make=make, options=options) if is_sound else ""}


def _worked(target: FakeTarget, name: str) -> str:
    """Train, evaluate, put a new object in its place and train on; give what the training has raised, "" if nothing."""
    try:
        target.run_steps(STEPS)
        target.training.model.eval()
        target.tick()
        target.renew(name)
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
    """Do what the only argument says, with one plugin after the other."""
    import torch  # paid once: each plugin is tried in a fork of this process

    torch.set_num_threads(1)  # more of them wait for each other where the machine is busy
    small()  # its optimizer imports the half of torch that `import torch` leaves out
    request = json.loads(sys.argv[1])
    for one in request["plugins"]:
        child = os.fork()
        if not child:
            _try_alone(request, one)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not Path(one["out"]).exists():
            told = {
                "refused": f"the process ended with {status} while it was tried",
                "hint": "no hook may end the training",
            }
            Path(one["out"]).write_text(json.dumps(told))


def _try_alone(request: dict[str, Any], one: dict[str, str]) -> NoReturn:
    """Try a plugin and end this process, whatever happens: what comes after belongs to the one that was forked."""
    status = 1
    try:
        told = _tried(request, one)
        Path(one["out"]).write_text(json.dumps(told))
        status = 0
    except BaseException:  # noqa: BLE001  SystemExit, too
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tried(request: dict[str, Any], one: dict[str, str]) -> dict[str, Any]:
    sys.path.insert(0, one["directory"])
    module, _, name = one["entry"].partition(":")
    what = {"check": check, "bench": bench}[request["what"]]
    try:
        plugin = getattr(importlib.import_module(module), name)
        return what(plugin, one["directory"], request["options"])
    except PluginError as error:
        return {"refused": error.message, "hint": error.hint}
    except Exception as error:  # noqa: BLE001  (of the author's import, say: it is for the author to read)
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        place = _place(error, one["directory"])
        hint = "" if place["line"] else traceback.format_exc()
        if isinstance(error, ModuleNotFoundError):
            hint = "it is not in this Python: --python names another, such as that of the training"
        return {"refused": text, "hint": hint, **place}


if __name__ == "__main__":
    main()
