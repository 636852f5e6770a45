"""Every hook that a plugin can implement: the reference for plugin authors. Runs in the target.

A plugin implements any subset of the hooks, and each hook with any subset of its arguments, by name:

    from hookd import Plugin, hookimpl

    class Widths(Plugin):
        name = "widths"

        @hookimpl
        def configure(self, context):
            self.calls = context.counter("calls", "Calls of each linear layer.", ["module"])

        @hookimpl
        def select(self, module):
            return module.type == "Linear"

        @hookimpl
        def forward(self, module):
            self.calls.labels(module.name).inc()

What holds for all of them:
- Hot hooks (all but configure, succeed, unconfigure, select and tick) run inside the training code, in the thread that runs
  it. Return at once: no I/O, no lock, no `.item()` on a device tensor, no random numbers.
- What is passed is the training code's own: never keep a tensor, never change one in place.
- A hook that asks for a tensor (inputs, kwargs, output, grad...) runs under `no_grad` and outside torch's dispatch
  modes; one that does not is cheaper, because nothing has to be switched.
- A hook that raises is counted; after `max_errors` its plugin is quarantined and training goes on.
- Only a plugin with `mutates = True` that was enabled by name may return something from a hot hook. An observer that
  does is counted as in error, and what it returned is ignored.
- A plugin with `mutates = True` may raise `hookd.TrainingError` for the training code itself: only that is passed on.
- Arguments have no defaults (pluggy treats those as constants), and hook wrappers are refused.
- A module call made again by activation checkpointing inside a backward is passed on only to hooks that ask for
  `recompute`, so nothing is counted twice by accident; a mutating plugin gets it always, since a recompute must give
  what the first pass gave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd._pluggy import HookspecMarker

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from hookd.context import Context
    from hookd.events import Call, Module
    from hookd.plugin import Plugin

hookspec = HookspecMarker("hookd")


@hookspec
def configure(context: Context) -> None:
    """Read the options and declare the metrics; once, before anything else, in hookd's own thread.

    Raising here refuses the plugin and tells the person who asked for it why.

        @hookimpl
        def configure(self, context):
            self.every = context.option("every", 10)
            self.norm = context.gauge("norm", "L2 norm of the output.", ["module"])
    """


@hookspec
def succeed(predecessor: Plugin) -> None:
    """Take over what must survive new options: they make a new object, and this is the one that was there before.

    Once, after `configure`, when this one is about to be switched on: where an optimizer step begins, or for observers in
    hookd's own thread, while the training goes on. No event comes to either of them meanwhile, but one that the other is
    just being told of may still be under way: share objects rather than copying what is in them. Of its metrics those
    series go on that this one has made as well: `metric.adopt(predecessor.metric)` makes them all.

        @hookimpl
        def succeed(self, predecessor):
            self.calls.adopt(predecessor.calls)
            self.first = predecessor.first
    """


@hookspec
def unconfigure() -> None:
    """Let go of everything; once, at unload and at detach, in hookd's own thread, after the last event.

    @hookimpl
    def unconfigure(self):
        self.file.close()
    """


@hookspec
def select(module: Module) -> bool | Collection[str] | None:
    """Say whether this plugin wants the events of `module`; once per module, before its first event.

    In the training thread, when a model is first called (after an attach in portions, over its next calls): be quick.
    Without this hook a plugin gets every module. Return True to select, or the names of the hooks wanted there: `{"forward", "backward_pre"}`. `backward` is the
    dearest, and dearer the more the module contains.

        @hookimpl
        def select(self, module):
            return module.depth <= 2 and module.type != "Dropout"
    """


@hookspec
def forward_pre(module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], recompute: bool) -> Any:
    """Run before `forward` of a selected module; at every call, in the calling thread.

    Mutating plugins: as torch's forward pre-hooks. A returned value replaces the positional inputs and is wrapped
    into a tuple if it is none; a hook that asks for `kwargs` returns `(inputs, kwargs)` instead. The next hook sees
    it. Source: torch/nn/modules/module.py `_call_impl`, 2.13.

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

        @hookimpl
        def forward(self, module, output):
            if isinstance(output, torch.Tensor):
                self.norm.labels(module.name).set(float(output.norm()))
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

        @hookimpl
        def forwards(self, calls):
            if not all(self.context.is_finite(call.output) for call in calls):
                ...
    """


@hookspec
def root_forward_pre(module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], recompute: bool) -> Any:
    """Run before `forward` of a root, together with the `forward_pre` hooks; of no other module.

    What `root_forward` is to `forward`. A hook of an observer that asks for no tensor sees the grad mode and the autocast
    with which the model is called.

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

        @hookimpl
        def root_forward(self, output):
            self.calls.inc()
    """


@hookspec
def forward_error(module: Module, error: BaseException) -> None:
    """Run when `forward` of a selected module raised; the error goes on to the training code whatever happens here.

    Not called for the early stop of an activation checkpoint, which is no error.

        @hookimpl
        def forward_error(self, module, error):
            self.context.incident("error", f"{module.name}: {error}", module=module.name)
    """


@hookspec
def backward_pre(module: Module, grad_output: tuple[Any, ...]) -> Any:
    """Run when the gradient of the module's output is known, before the module's own backward.

    In the thread that runs the backward: the caller's on a CPU, autograd's device thread on a GPU. `grad_output` has
    one entry for each tensor found in the output (dicts, tuples and dataclasses are searched), None where there is
    no gradient. Mutating plugins: a returned value replaces `grad_output`; a single tensor is wrapped into a tuple.
    They are called once for each autograd node that made outputs, as its gradients come: the others are None then.
    Observers are called once for each part of the output that shares no node with another part.

        @hookimpl
        def backward_pre(self, module, grad_output):
            self.seen.labels(module.name).inc()
    """


@hookspec
def backward(
    module: Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...], elapsed_ns: int, self_ns: int
) -> Any:
    """Run when the module's backward is done.

    `grad_input` has one entry for each positional input, None where it is no tensor or needs no gradient; it is the
    gradient that flows out of this module alone, not the sum over all users of the input. `elapsed_ns` is the wall
    time from the first of the module's nodes to the last, without the recomputes and without hookd's own hooks in
    between. What the engine does between them is in it: accumulating into `.grad` what the nodes before the last one
    give, and nodes of others that interleave with them. `self_ns` is what of it was not spent in modules inside. Of a
    sampled call it is run whenever that call's backward comes, be it in a later step, which is not sampled.

    Mutating plugins: a returned value replaces `grad_input`, as torch's full backward hook would, without adding
    nodes to the graph and with in-place operations allowed. They are called once for each group of inputs whose
    gradients are complete at the same time: the others are None then. Of a tensor that was passed in twice they see
    the sum, at its first place.

        @hookimpl
        def backward(self, module, elapsed_ns):
            self.seconds.labels(module.name).inc(elapsed_ns / 1e9)
    """


@hookspec
def param_grad(module: Module, name: str, param: Parameter, grad: Tensor) -> None:
    """Run when the gradient of a parameter has been accumulated into `.grad`; once per parameter and backward.

    The gradient is local (before DistributedDataParallel reduces it) and still scaled by a GradScaler. `module` owns
    the parameter, `name` is the parameter's name in the whole model. Never mutates: use `step_pre`.

        @hookimpl
        def param_grad(self, name, grad):
            self.norm.labels(name).set(float(grad.norm()))
    """


@hookspec
def loss(tensors: tuple[Any, ...]) -> None:
    """Run when `torch.autograd.backward` is called, before it does anything; `tensors` is what it was called on.

    @hookimpl
    def loss(self, tensors):
        self.value.set(float(tensors[0]))
    """


@hookspec
def loss_done(elapsed_ns: int) -> None:
    """Run when that backward has returned or raised; `elapsed_ns` is the wall time of all of it.

    A backward inside another one (reentrant checkpointing makes some) belongs to the outer one.

        @hookimpl
        def loss_done(self, elapsed_ns):
            self.seconds.inc(elapsed_ns / 1e9)
    """


@hookspec
def step_pre(optimizer: Optimizer, step: int, has_closure: bool) -> None:
    """Run before `optimizer.step` does anything: gradients are reduced, accumulated and (if not fused) unscaled.

    The place to look at, or with `mutates = True` to change, `.grad`. With a closure the gradients of this step are
    computed inside of it, perhaps several times (LBFGS): see `closure_done`.

        @hookimpl
        def step_pre(self, optimizer, step):
            self.lr.set(optimizer.param_groups[0]["lr"])
    """


@hookspec
def closure_done(optimizer: Optimizer, step: int) -> None:
    """Run when a closure that was given to `optimizer.step` has returned: its gradients are there, and used next.

    Like `step_pre`, for optimizers that are called with a closure; as often as the closure is.

        @hookimpl
        def closure_done(self, optimizer):
            self.evaluations.inc()
    """


@hookspec
def step_post(optimizer: Optimizer, step: int, elapsed_ns: int) -> None:
    """Run after `optimizer.step`; `elapsed_ns` is the optimizer's own wall time.

    @hookimpl
    def step_post(self, elapsed_ns):
        self.seconds.inc(elapsed_ns / 1e9)
    """


@hookspec
def phase(name: str, now_ns: int) -> None:
    """Run when the calling thread goes over to another phase: other, data, forward, backward or optimizer.

    `data` is waiting for a DataLoader of torch, `forward` an outermost module call, `backward` is
    `torch.autograd.backward`, a recompute in it included. What is inside another phase goes back to that when it ends;
    a call inside `data` (a transform is a module) or inside another call is no phase of its own. Autograd's own
    threads have none. `now_ns` is `time.perf_counter_ns()` at the change.

        @hookimpl
        def phase(self, name, now_ns):
            self.seconds.labels(self.last).inc((now_ns - self.since_ns) / 1e9)
            self.last, self.since_ns = name, now_ns
    """


@hookspec
def mode(module: Module, training: bool) -> None:
    """Run when a model was switched by `train()` or `eval()`; once per outermost call, not for its children.

    @hookimpl
    def mode(self, module, training):
        self.training.set(training)
    """


@hookspec
def tick(now_s: float) -> None:
    """Run about once a second in hookd's own thread, while training goes on: never touch a tensor here.

    @hookimpl
    def tick(self, now_s):
        self.alive.set(now_s)
    """


HOT = frozenset(
    [
        "forward_pre",
        "forward",
        "forwards",
        "root_forward",
        "root_forward_pre",
        "forward_error",
        "backward_pre",
        "backward",
        "param_grad",
        "loss",
        "loss_done",
        "phase",
        "step_pre",
        "closure_done",
        "step_post",
        "mode",
    ]
)
MODULE = frozenset(
    [
        "forward_pre",
        "forward",
        "forwards",
        "root_forward_pre",
        "root_forward",
        "forward_error",
        "backward_pre",
        "backward",
    ]
)
"""The hooks that are called per selected module."""
TENSORS = frozenset(["calls", "inputs", "kwargs", "output", "grad_input", "grad_output", "grad", "tensors", "param"])
"""The arguments that make a hook run under no_grad, outside dispatch modes."""
TIMES = frozenset(["elapsed_ns", "self_ns"])
"""The arguments for which the clock is read."""


def arguments(hook: str) -> Mapping[str, Any]:
    """Give the annotations of a hook by its name, for messages to plugin authors."""
    return {k: v for k, v in globals()[hook].__annotations__.items() if k != "return"}
