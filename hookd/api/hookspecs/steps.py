"""Hooks around the optimizer step, and the phases of a training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.api.hookspecs.marker import hookspec

if TYPE_CHECKING:
    from torch.optim import Optimizer


@hookspec
def step_pre(optimizer: Optimizer, step: int, has_closure: bool) -> None:
    """Run before `optimizer.step` does anything: gradients are reduced, accumulated and (if not fused) unscaled.

    Read `.grad` here, or change it with `mutates = True`. With a closure, the gradients of this step are computed inside
    the closure, perhaps several times (LBFGS): see `closure_done`.

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
    """Run when a closure given to `optimizer.step` has returned: its gradients exist, and are used next.

    Like `step_pre`, for optimizers that are called with a closure; once per call of the closure.

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
def step_done(step: int, elapsed_ns: int) -> None:
    """Run when a training step is over, whether one optimizer, several, or the training's own code made it.

    `elapsed_ns` is the wall time since the step before, without inference: calls that no backward follows, and the time between
    them. It is 0 if unknown, as for the first step after the attach.

    If several optimizers step after one backward, it follows the `step_pre` and `step_post` of all of them. The first time is an
    exception: hookd does not know yet that there are several.

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
    """Run when the calling thread enters another phase: other, data, forward, backward, collectives, optimizer or inference.

    `data` is waiting for a DataLoader of torch, `forward` an outermost module call, `inference` one that no backward follows
    (a validation, a rollout), `backward` is `torch.autograd.backward`, a recompute in it included. When a nested phase ends,
    the enclosing phase resumes. A call inside `data` (a transform is a module) or inside another call is not a phase of its
    own. Autograd's own threads have no phases. `now_ns` is `time.perf_counter_ns()` at the change.

    Called: at every change, some ten times a step.
    Thread: the training's.
    May: nothing but look.
    Cost: class 1 for each change.

        @hookimpl
        def phase(self, name, now_ns):
            self.phase_seconds.labels(self.last).inc((now_ns - self.since_ns) / 1e9)
            self.last, self.since_ns = name, now_ns
    """
