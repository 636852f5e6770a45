"""Hooks around the backward: of modules, of parameters, of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.api.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from hookd.api.events import Module


@hookspec
def backward_pre(module: Module, grad_output: tuple[Any, ...]) -> Any:
    """Run when the gradient of the module's output is known, before the module's own backward.

    `grad_output` has one entry for each tensor found in the output (dicts, tuples and dataclasses are searched), None where
    there is no gradient.

    In a mutating plugin, a returned value replaces `grad_output`; a single tensor is wrapped into a tuple. Mutators are called
    once for each autograd node that made outputs, as its gradients arrive; the other entries are None then. Observers are called
    once for each part of the output that shares no node with another part.

    Called: once for each call of a selected module, in its backward; for observers, not for a call nested in another call of the same module.
    Thread: the one that runs the backward: the caller's on a CPU, autograd's device thread on a GPU.
    May: as a mutator: replace `grad_output`.
    Cost: class 3 for each call.

        @hookimpl
        def backward_pre(self, module, grad_output):
            self.seen.labels(module.name).inc()
    """


@hookspec
def backward(
    module: Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...], elapsed_ns: int, self_ns: int
) -> Any:
    """Run when the module's backward is done.

    `grad_input` has one entry for each positional input, None where the input is not a tensor or needs no gradient. It is
    the gradient that flows out of this module alone, not the sum over all users of the input.

    `elapsed_ns` is the wall time from the first of the module's nodes to the last, without recomputes and without hookd's
    own hooks in between. It includes the engine's work between them: accumulating the gradients of the nodes before the
    last one into `.grad`, and nodes of other modules that interleave. `self_ns` excludes nested modules. For a sampled
    call, the hook runs whenever that call's backward comes, even in a later step that is not sampled.

    In a mutating plugin, a returned value replaces `grad_input`, as torch's full backward hook would, without adding
    nodes to the graph and with in-place operations allowed. Mutators are called once for each group of inputs whose
    gradients are complete at the same time; the other entries are None then. For a tensor that was passed in twice they
    see the sum, at its first position.

    Called: once for each call of a selected module, in its backward; for observers, not for a call nested in another call of the same module.
    Thread: as `backward_pre`.
    May: as a mutator: replace `grad_input`.
    Cost: class 3 for each call; it grows with what the module contains.

        @hookimpl
        def backward(self, module, elapsed_ns):
            self.seconds.labels(module.name).inc(elapsed_ns / 1e9)
    """


@hookspec
def param_grad(module: Module, name: str, param: Parameter, grad: Tensor) -> None:
    """Run when the gradient of a parameter has been accumulated into `.grad`; once per parameter and backward.

    The gradient is local (before DistributedDataParallel reduces it) and still scaled by a GradScaler. `module` owns
    the parameter, `name` is the parameter's name in the whole model. Never mutates: use `step_pre`.

    Called: once for each parameter and backward.
    Thread: as `backward_pre`.
    May: nothing but look; mutators use `step_pre`.
    Cost: class 2 for each parameter.

        @hookimpl
        def param_grad(self, name, grad):
            norm = self.norm.labels(name)
            self.context.summary(grad, lambda summary: norm.set(summary.norm))
    """


@hookspec
def loss(tensors: tuple[Any, ...]) -> None:
    """Run when `torch.autograd.backward` is called, before it does anything; `tensors` are its arguments.

    Called: at each outermost `torch.autograd.backward`.
    Thread: the caller's.
    May: nothing but look.
    Cost: class 0, once a step.

        @hookimpl
        def loss(self, tensors):
            self.context.later([tensors[0].detach()], lambda numbers: self.loss_value.set(numbers[0]))
    """


@hookspec
def loss_done(elapsed_ns: int) -> None:
    """Run when that backward has returned or raised; `elapsed_ns` is its total wall time.

    A backward inside another one (reentrant checkpointing makes some) belongs to the outer one.

    Called: at the end of each outermost `torch.autograd.backward`.
    Thread: the caller's.
    May: nothing but look.
    Cost: class 0, once a step.

        @hookimpl
        def loss_done(self, elapsed_ns):
            self.loss_seconds.inc(elapsed_ns / 1e9)
    """
