"""Train with each of some plugins and report its behavior and cost, for `hookd plugin check` and `hookd plugin bench`.

    python -m hookd.testing.measure '{"what": "check", "options": {}, "plugins": [{"entry": "hookd_widths:Widths",
        "directory": "/src", "out": "FILE"}]}'

Runs in its own process, in an environment with torch. It writes a JSON object to each `out`.
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
    from collections.abc import Callable, Mapping

    from hookd.api.plugin import Plugin
    from hookd.testing.pairs import Estimate
    from hookd.testing.training import Training
    from hookd.testing.trials import (
        BenchAnswer,
        Benched,
        BenchedHook,
        Bounds,
        CheckAnswer,
        DeclaredMetric,
        HookCost,
        PlacedRefusal,
        Raised,
        Refusal,
        Trained,
        TrialRequest,
        TriedPlugin,
    )

    Trial = Callable[[type[Plugin], str, Mapping[str, object]], CheckAnswer | BenchAnswer]

STEPS, BENCH_STEPS, BENCH_PAIRS = 10, 20, 40
OF_MODULES = {"forward_pre", "forward", "forwards", "backward_pre", "backward"}
MODELS: dict[str, Callable[[], Training]] = {
    "200 small modules": many_modules,
    "a transformer block": transformer_block,
}


class Probe:
    """Records time and memory of a plugin's hooks, the metrics that it declares, and the exceptions that it raises.

    Args:
        directory: of the plugin's sources.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.took: dict[str, list[int]] = {}
        self.memory: dict[str, list[tuple[int, int]]] = {}
        self.raised: dict[tuple[str, int], Raised] = {}
        self.metrics: list[DeclaredMetric] = []
        self.counts_memory = False
        self._nothing = _cost_of_the_clock()

    def around(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that measures a hook and is called in its place."""

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
        file, line = _place(error, self._directory)
        raised: Raised = {"hook": hook, "error": worded(error), "file": file, "line": line}
        self.raised.setdefault((file, line), raised)

    def _watch(self, context: Any) -> None:
        """Record each metric that is declared through the context, with the line that declares it."""
        declare = context._declare  # noqa: SLF001

        def noted(metric: Any) -> Any:
            frame: Any = sys._getframe(1)  # noqa: SLF001
            while frame is not None and not frame.f_code.co_filename.startswith(self._directory):
                frame = frame.f_back
            file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
            labels = list(metric.label_names)
            self.metrics.append({
                "kind": metric.kind, "name": metric.name, "labels": labels, "file": file, "line": line,
            })  # fmt: skip
            return declare(metric)

        context._declare = noted  # noqa: SLF001

    def hooks(self) -> dict[str, HookCost]:
        """Return the cost of each hook."""
        return {hook: _cost(took) for hook, took in self.took.items() if hook in hookspecs.HOT}


def _place(error: BaseException, directory: str) -> tuple[str, int]:
    """Return file and number of the innermost line of the plugin's sources; "" and 0 if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(directory)]
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)


def _cost_of_the_clock() -> int:
    took = []
    for _ in range(200):
        begun = time.perf_counter_ns()
        took.append(time.perf_counter_ns() - begun)
    return int(statistics.median(took))


def _cost(took: list[int]) -> HookCost:
    low, middle, high = statistics.quantiles(took, n=4, method="inclusive") if len(took) > 1 else took * 3
    return {"calls": len(took), "ns": middle, "low_ns": low, "high_ns": high}


def check(plugin: type[Plugin], directory: str, options: Mapping[str, object]) -> CheckAnswer:
    """Train some steps with a plugin, call all lifecycle hooks, and compare trainings with and without it, bit for bit.

    If a chain of small layers does not call all hooks, a transformer block is trained as well.
    """
    probe = Probe(directory)
    module_hooks = OF_MODULES & hooks_of(plugin).keys()
    for make in (small, lambda: transformer_block(32, 16)):
        report = _trained_with(plugin, make, probe, options)
        uncalled = sorted(module_hooks - probe.took.keys() - {error["hook"] for error in probe.raised.values()})
        if not uncalled or report["errors"] or report["broken"] or report["difference"]:
            break
    return {
        **report,
        "hooks": probe.hooks(),
        "metrics": probe.metrics,
        "raised": list(probe.raised.values()),
        "uncalled": uncalled,
    }


def _trained_with(
    plugin: type[Plugin], make: Callable[[], Training], probe: Probe, options: Mapping[str, object]
) -> Trained:
    with FakeTarget(record=False, make=make) as target:
        target.start(wrapped(plugin, probe.around), **options)
        broken = _worked(target, plugin.name)
        state, mutates = target.state(plugin.name), target.plugin(plugin.name).mutates
        errors, logs = target.errors, target.logs
    is_sound = not errors and not mutates and not broken
    difference = first_difference((plugin,), make=make, options=options) if is_sound else ""
    return {
        "state": state, "errors": sum(errors.values()), "logs": logs, "mutates": mutates, "broken": broken,
        "difference": difference,
    }  # fmt: skip


def _worked(target: FakeTarget, name: str) -> str:
    """Train, evaluate, replace the plugin object and train again; return the exception of the training, "" if none."""
    try:
        target.run_steps(STEPS)
        target.training.model.eval()
        target.tick()
        target.renew(name)
        target.run_steps(STEPS)
    except PluginError:
        raise
    except Exception as error:  # noqa: BLE001  (raised by torch after the plugin has changed a tensor)
        return worded(error)
    return ""


def bench(plugin: type[Plugin], directory: str, options: Mapping[str, object]) -> BenchAnswer:
    """Measure each hook by itself, and steps with and without the plugin, on two models."""
    return {"models": {name: _on(make, plugin, directory, options) for name, make in MODELS.items()}}


def _on(make: Callable[[], Training], plugin: type[Plugin], directory: str, options: Mapping[str, object]) -> Benched:
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
    hooks = {hook: _with_memory(cost, probe.memory.get(hook, [(0, 0)])) for hook, cost in probe.hooks().items()}
    pairs = overhead((plugin,), make=make, pairs=BENCH_PAIRS, options=options)
    return {"hooks": hooks, "ratio": _as_json(pairs.ratio), "control": _as_json(pairs.control)}


def _with_memory(cost: HookCost, sizes: list[tuple[int, int]]) -> BenchedHook:
    peak = statistics.median(peak for peak, _ in sizes)
    return {**cost, "peak_bytes": peak, "kept_bytes": statistics.median(kept for _, kept in sizes)}


def _as_json(estimate: Estimate) -> Bounds:
    return {"median": estimate.value, "low": estimate.low, "high": estimate.high}


def main() -> None:
    """Run the request in the only argument, one plugin after the other."""
    import torch  # imported once: each plugin is tried in a fork of this process

    torch.set_num_threads(1)  # on a busy machine, several threads would wait for each other
    small()  # its optimizer imports large parts of torch that `import torch` does not
    request: TrialRequest = json.loads(sys.argv[1])
    for plugin in request["plugins"]:
        child = os.fork()
        if not child:
            _try_alone(request, plugin)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not Path(plugin["out"]).exists():
            refusal: Refusal = {
                "refused": f"the process ended with {status} while it was tried",
                "hint": "no hook may end the training",
            }
            Path(plugin["out"]).write_text(json.dumps(refusal))


def _try_alone(request: TrialRequest, plugin: TriedPlugin) -> NoReturn:
    """Try a plugin and end this forked process, whatever happens: only the parent may go on after it."""
    status = 1
    try:
        report = _tried(request, plugin)
        Path(plugin["out"]).write_text(json.dumps(report))
        status = 0
    except BaseException:  # noqa: BLE001  SystemExit too
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tried(request: TrialRequest, plugin: TriedPlugin) -> CheckAnswer | BenchAnswer | PlacedRefusal:
    sys.path.insert(0, plugin["directory"])
    module, _, name = plugin["entry"].partition(":")
    trials: dict[str, Trial] = {"check": check, "bench": bench}
    trial = trials[request["what"]]
    try:
        plugin_class = getattr(importlib.import_module(module), name)
        return trial(plugin_class, plugin["directory"], request["options"])
    except PluginError as error:
        return {"refused": error.message, "hint": error.hint}
    except Exception as error:  # noqa: BLE001  (raised by the plugin's import, for example; reported to its author)
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        file, line = _place(error, plugin["directory"])
        hint = "" if line else traceback.format_exc()
        if isinstance(error, ModuleNotFoundError):
            hint = "it is not installed in this Python; pass another one, such as that of the training, with --python"
        return {"refused": text, "hint": hint, "file": file, "line": line}


if __name__ == "__main__":
    main()
