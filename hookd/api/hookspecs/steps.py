"""Hooks around the optimizer step, and the phases of a training loop. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.api.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from torch.optim import Optimizer


@hookspec
def step_pre(optimizer: Optimizer, step: int, has_closure: bool) -> None:
    """Run before `optimizer.step` does anything: gradients are reduced, accumulated and (if not fused) unscaled.

    The place to look at, or with `mutates = True` to change, `.grad`. With a closure the gradients of this step are
    computed inside of it, perhaps several times (LBFGS): see `closure_done`.

    Called: at every `optimizer.step`.
    Thread: the caller's.
    May: as a mutator: change `.grad` in place.
    Cost: class 0, once a step.

        @hookimpl
        def step_pre(self, optimizer, step):
            self.lr.set(optimizer.param_groups[0]["lr"])
    """


@hookspec
def closure_done(optimizer: Optimizer, step: int) -> None:
    """Run when a closure that was given to `optimizer.step` has returned: its gradients are there, and used next.

    Like `step_pre`, for optimizers that are called with a closure; as often as the closure is.

    Called: after every call of a closure given to `optimizer.step`.
    Thread: the caller's.
    May: as a mutator: change `.grad` in place.
    Cost: not measured; as `step_pre`.

        @hookimpl
        def closure_done(self, optimizer):
            self.evaluations.inc()
    """


@hookspec
def step_post(optimizer: Optimizer, step: int, elapsed_ns: int) -> None:
    """Run after `optimizer.step`; `elapsed_ns` is the optimizer's own wall time.

    Called: after every `optimizer.step`.
    Thread: the caller's.
    May: nothing but look.
    Cost: class 0, once a step.

        @hookimpl
        def step_post(self, elapsed_ns):
            self.step_seconds.inc(elapsed_ns / 1e9)
    """


@hookspec
def step_done(step: int) -> None:
    """Run when a step of the training is over, whatever made it: one optimizer or several, or the training's own code.

    Where several optimizers step after one backward, all of their `step_pre` and `step_post` have come before it, but for
    the first time, when nobody knows yet that there are several.

    Called: once for each step.
    Thread: the training's.
    May: nothing but look.
    Cost: class 0, once a step.

        @hookimpl
        def step_done(self, step):
            self.steps.inc()
    """


@hookspec
def phase(name: str, now_ns: int) -> None:
    """Run when the calling thread goes over to another phase: other, data, forward, backward or optimizer.

    `data` is waiting for a DataLoader of torch, `forward` an outermost module call, `backward` is
    `torch.autograd.backward`, a recompute in it included. What is inside another phase goes back to that when it ends;
    a call inside `data` (a transform is a module) or inside another call is no phase of its own. Autograd's own
    threads have none. `now_ns` is `time.perf_counter_ns()` at the change.

    Called: at every change, some ten times a step.
    Thread: the training's.
    May: nothing but look.
    Cost: class 1 for each change.

        @hookimpl
        def phase(self, name, now_ns):
            self.phase_seconds.labels(self.last).inc((now_ns - self.since_ns) / 1e9)
            self.last, self.since_ns = name, now_ns
    """
