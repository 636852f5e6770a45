"""Hooks around the forward of modules. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.api.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.api.events import Call, Module
    from hookd.api.summary import Summary


@hookspec
def forward_pre(module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], recompute: bool) -> Any:
    """Run before `forward` of a selected module; at every call, in the calling thread.

    Mutating plugins: as torch's forward pre-hooks. A returned value replaces the positional inputs and is wrapped
    into a tuple if it is none; a hook that asks for `kwargs` returns `(inputs, kwargs)` instead. The next hook sees
    it. Source: torch/nn/modules/module.py `_call_impl`, 2.13.

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
) -> Any:
    """Run after `forward` of a selected module has returned; at every call, in the calling thread.

    `elapsed_ns` is wall time, children included; on a GPU it is the time to launch, not to run. `self_ns` is what of
    it was not spent in calls inside this one of which somebody asks the time. `inputs` may have been modified in place
    by the module: then `hookd.versions(inputs, kwargs)` is not what `versions` was at entry (empty where that could not
    be asked). Of a recompute that torch ends early, before there is an output, those are told that ask for no `output`.

    Mutating plugins: a returned value replaces the output, for the next hook as well.

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

    What `forward` tells of each, at a fraction of its cost: what a hook costs beside its own work is paid once for up to
    256 calls. Those that wait are single tensors of up to 1 M elements, 2 M at a time; all others are handed over as they
    return, and so is a root. None waits beyond the outermost call, or an exception. What waits may be changed in place
    meanwhile: that is seen (`Call.is_changed`), and from then on hookd looks at the numbers of that module's output before it
    waits (`Call.was_finite`); if they are not all finite, it is handed over as it was returned. Of a recompute it is not
    told, and what a mutator returns is not used.

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

    No function is needed to show them: `Context.show_outputs` puts them into gauges, in C where calls are entered there and the output is one
    contiguous tensor in the host's memory. A plugin that uses it is called only for outputs of which at least the
    share that it has named is 0, for the first output after them, and for those in float16; any other plugin is called for each output.
    On a device the statistics come a step later, when `output` is gone: it is None then.

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

    Where calls are entered in C, what modules return is looked at there, at every call, for less than a microsecond: tensors and
    tuples of up to 8 of them, in the host's memory, each of up to 65,536 elements; `-inf` alone is taken for a mask.
    After the first one that is not finite it is told of every call that returns, until the outermost call is over. Where a
    plugin listens to `forwards` as well, in its sampled steps, larger outputs are looked at in C too, and hookd hands over there only calls that
    have returned anything else, so a plugin with both misses nothing and reads nothing twice (`Context.has_seen_all`). Of a model's outermost
    call it is told in that case alone, and of a recompute never; `Call.before` is empty unless the module was given a single tensor.

    Called: after a call of a selected module has returned what is not finite.
    Thread: the caller's.
    May: nothing but look.
    Cost: class 0 where all is finite.

        @hookimpl
        def suspect(self, call):
            self.context.incident("nan", f"{call.module.name} has returned a NaN", module=call.module.name)
    """


@hookspec
def root_forward_pre(module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], recompute: bool) -> Any:
    """Run before `forward` of a root, together with the `forward_pre` hooks; of no other module.

    What `root_forward` is to `forward`. A hook of an observer that asks for no tensor sees the grad mode and the autocast
    with which the model is called.

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
) -> Any:
    """Run after `forward` of a root has returned, after all `forward` hooks; of no other module.

    For what must look at a model as a whole at every step while it looks into it on sampled steps only: a plugin has
    `forward` in `sampled` and this hook not. In all else it is as `forward`.

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
    """Run when `forward` of a selected module raised; the error goes on to the training code whatever happens here.

    Not called for the early stop of an activation checkpoint, which is no error.

    Called: when a selected module raised.
    Thread: the caller's.
    May: report it.
    Cost: nothing where nothing is raised.

        @hookimpl
        def forward_error(self, module, error):
            self.context.incident("error", f"{module.name}: {error}", module=module.name)
    """
