"""Hooks around the forward of modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.api.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.api.events import Call, Module
    from hookd.api.summary import Summary


@hookspec
def forward_pre(
    module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], recompute: bool, inference: bool
) -> Any:
    """Run before `forward` of a selected module; at every call, in the calling thread.

    In a mutating plugin it works like torch's forward pre-hooks. A returned value replaces the positional inputs; a value
    that is not a tuple is wrapped into one. A hook that asks for `kwargs` returns `(inputs, kwargs)` instead. The next hook
    sees the new inputs. Source: torch/nn/modules/module.py `_call_impl`, 2.13.

    Called: at every call of a selected module.
    Thread: the caller's.
    May: as a mutator: replace inputs.
    Cost: class 1 for each call; class 2 with tensors.

        @hookimpl
        def forward_pre(self, module, inputs):
            self.batch = len(inputs[0])
    """


@hookspec
def forward(
    module: Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    versions: tuple[int, ...],
    elapsed_ns: int,
    self_ns: int,
    recompute: bool,
    inference: bool,
) -> Any:
    """Run after `forward` of a selected module has returned; at every call, in the calling thread.

    `elapsed_ns` is wall time, children included; on a GPU it is the time to launch, not to run. `self_ns` excludes nested
    calls that are timed too. The module may have modified `inputs` in place: then `hookd.versions(inputs, kwargs)` differs
    from `versions`, which was read at entry (empty where it could not be read). When torch ends a recompute early, before
    there is an output, only hooks that do not ask for `output` are called.

    In a mutating plugin, a returned value replaces the output, for the next hook as well.

    Called: at every call of a selected module.
    Thread: the caller's.
    May: as a mutator: replace the output.
    Cost: class 1 for each call; class 2 with tensors.

        @hookimpl
        def forward(self, module, output):
            if isinstance(output, torch.Tensor):
                norm = self.norm.labels(module.name)
                self.context.summary(output, lambda summary: norm.set(summary.norm))
    """


@hookspec
def forwards(calls: Sequence[Call]) -> None:
    """Run after some calls of selected modules have returned, in the order of returning, in the calling thread.

    Each call carries what `forward` gets, at a fraction of the cost: the overhead of calling a hook is paid once for up to
    256 calls. Calls that return a single tensor of up to 1 M elements wait, up to 2 M elements at a time. All others are
    passed on as soon as they return, and so is a root. No call waits beyond the end of the outermost call, or an exception.

    A waiting output may be changed in place. hookd detects that (`Call.is_changed`), and from then on checks that module's
    output before it waits (`Call.was_finite`). An output that is not all finite is passed on as it was returned.

    The hook is not called for a recompute, and its return value is ignored, even a mutator's.

    Called: for up to 256 calls of selected modules at a time.
    Thread: the caller's.
    May: nothing but look.
    Cost: class 2 for each module call.

        @hookimpl
        def forwards(self, calls):
            self.bad.inc(sum(not self.context.is_finite(call.output) for call in calls))
    """


@hookspec
def output_summary(module: Module, output: Any, summary: Summary) -> None:
    """Run after a call of a selected module has returned, with the statistics of the first floating-point tensor in its output.

    Gauges of these statistics do not need this hook: `Context.show_outputs` sets them. It works in C where calls are entered in C
    and the output is one contiguous tensor in host memory. A plugin that uses it gets this hook only for outputs whose share of
    zeros reaches its `zeros`, for the first output after them, and for outputs in float16. Any other plugin gets it for each output.
    On a device the statistics arrive a step later. The output is gone by then, and `output` is None.

    Called: after a call of a selected module.
    Thread: the caller's.
    May: nothing but look.
    Cost: class 2 where it is called.

        @hookimpl
        def output_summary(self, module, summary):
            if summary.zero_ratio == 1:
                self.context.log(f"{module.name} returns nothing but 0")
    """


@hookspec
def suspect(call: Call) -> None:
    """Run after a call of a selected module has returned a NaN or an infinity, at once, in whatever step.

    Where calls are entered in C, C checks the output of every call, in less than a microsecond. It checks tensors, and tuples of
    up to 8 tensors, in host memory, each of up to 65,536 elements. An output whose only such values are `-inf` counts as a mask.
    After the first output that is not finite, the hook is called for every call that returns, until the outermost call is over.

    If the plugin also listens to `forwards`, C checks larger outputs too, in its sampled steps. `forwards` then gets only the calls
    that C could not check, so a plugin with both hooks misses nothing and reads nothing twice (`Context.has_seen_all`). Only in that
    case is the hook called for a model's outermost call. It is never called for a recompute. `Call.before` is empty unless the
    module was given a single tensor.

    Called: after a call of a selected module has returned a NaN or an infinity.
    Thread: the caller's.
    May: nothing but look.
    Cost: class 0 where all is finite.

        @hookimpl
        def suspect(self, call):
            self.context.incident("nan", f"{call.module.name} has returned a NaN", module=call.module.name)
    """


@hookspec
def root_forward_pre(
    module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], recompute: bool, inference: bool
) -> Any:
    """Run before `forward` of a root, together with the `forward_pre` hooks; of no other module.

    It relates to `forward_pre` as `root_forward` to `forward`. An observer's hook that asks for no tensor sees the grad mode and
    the autocast state with which the model is called.

    Called: at every call of a root.
    Thread: the caller's.
    May: as a mutator: replace inputs.
    Cost: class 0, once a step.

        @hookimpl
        def root_forward_pre(self):
            self.random = torch.get_rng_state()
    """


@hookspec
def root_forward(
    module: Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    versions: tuple[int, ...],
    elapsed_ns: int,
    recompute: bool,
    inference: bool,
) -> Any:
    """Run after `forward` of a root has returned, after all `forward` hooks; of no other module.

    A plugin uses it to observe the whole model at every step but its modules only in sampled steps: it lists `forward` in
    `sampled`, and not this hook. Otherwise it works like `forward`.

    Called: at every call of a root.
    Thread: the caller's.
    May: as a mutator: replace the output.
    Cost: class 0, once a step.

        @hookimpl
        def root_forward(self, output):
            self.calls.labels("(root)").inc()
    """


@hookspec
def forward_error(module: Module, error: BaseException) -> None:
    """Run when `forward` of a selected module raised; the error always propagates to the training code.

    Not called for the early stop of an activation checkpoint, which is not an error.

    Called: when a selected module raised.
    Thread: the caller's.
    May: report it.
    Cost: nothing where nothing is raised.

        @hookimpl
        def forward_error(self, module, error):
            self.context.incident("error", f"{module.name}: {error}", module=module.name)
    """
