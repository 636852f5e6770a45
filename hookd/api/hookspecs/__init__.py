"""Reference of the hooks that a plugin can implement.

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

The module `life` has the hooks around a plugin's own life, `calls` those of the forward, `gradients` those of the backward,
`steps` those of the optimizer. Each docstring states when the hook is called, in which thread, what it may do and what it costs,
with an example that a test runs (`tests/integration/test_hookspecs.py`).

Rules for all hooks:
- Hot hooks (all but configure, succeed, unconfigure, select and tick) run inside the training code, in the thread that runs
  it. Return at once: no I/O, no lock, no `.item()` on a device tensor, no random numbers.
- Arguments are the training code's own objects: never keep a tensor, never change one in place.
- A hook that asks for a tensor (inputs, kwargs, output, grad...) runs under `no_grad` and outside torch's dispatch
  modes; one that does not is cheaper, because no mode has to be switched.
- Exceptions of a hook are counted; after `max_errors` its plugin is quarantined, and the training goes on.
- Only a plugin with `mutates = True` that was enabled by name may return a value from a hot hook. For an observer this counts
  as an error, and the value is ignored.
- A plugin with `mutates = True` may raise `hookd.TrainingError` for the training code itself: only this exception propagates.
- Arguments have no defaults (pluggy treats those as constants), and hook wrappers are refused.
- `inference` is True for calls that no backward follows (`hookd.target.events.inference`): a validation, a rollout, a teacher.
- A module call that activation checkpointing repeats inside a backward is passed only to hooks that ask for `recompute`, so
  nothing is counted twice by accident. A mutating plugin always gets it, since a recompute must return what the first pass
  returned.

Cost of a hook in which the plugin does nothing, in CPU time of the training thread (`python -m tests.bench.hook_cost`, CPython
3.11, torch 2.13, 200 small modules on one core of a busy machine; the plugin's own work comes on top):

| class | per call | |
|---|---|---|
| 0 | less than 20 us, which was the noise | once a step |
| 1 | 3 to 5 us | no tensor asked for |
| 2 | 6 to 10 us | with tensors: grad mode and dispatch modes are switched; or in a portion |
| 3 | 40 to 75 us | nodes in the autograd graph |
"""

from __future__ import annotations

from hookd.api.hookspecs.calls import (
    forward,
    forward_error,
    forward_pre,
    forwards,
    output_summary,
    root_forward,
    root_forward_pre,
    suspect,
)
from hookd.api.hookspecs.gradients import backward, backward_pre, loss, loss_done, param_grad
from hookd.api.hookspecs.life import configure, mode, select, succeed, tick, unconfigure
from hookd.api.hookspecs.steps import closure_done, phase, step_done, step_post, step_pre

COLD = ("configure", "succeed", "unconfigure", "select", "tick")
"""The hooks that are not called from inside the training code."""
MODULE = frozenset(
    [
        "forward_pre",
        "forward",
        "forwards",
        "output_summary",
        "root_forward_pre",
        "root_forward",
        "forward_error",
        "suspect",
        "backward_pre",
        "backward",
    ]
)
"""The hooks that are called per selected module."""
FLOWS = ("backward_pre", "backward")
"""The hooks for which hookd hooks the autograd graph, in steps in which one of them is enabled."""
HOT = MODULE | {
    "param_grad",
    "loss",
    "loss_done",
    "phase",
    "step_pre",
    "closure_done",
    "step_post",
    "step_done",
    "mode",
}
HOOKS = frozenset({*COLD, *HOT})
TENSORS = frozenset(
    ["call", "calls", "inputs", "kwargs", "output", "grad_input", "grad_output", "grad", "tensors", "param"]
)
"""The arguments that make a hook run under no_grad, outside dispatch modes."""
TIMES = frozenset(["elapsed_ns", "self_ns"])
"""The arguments for which the clock is read."""

__all__ = [
    "COLD",
    "HOOKS",
    "HOT",
    "MODULE",
    "TENSORS",
    "TIMES",
    "backward",
    "backward_pre",
    "closure_done",
    "configure",
    "forward",
    "forward_error",
    "forward_pre",
    "forwards",
    "loss",
    "loss_done",
    "mode",
    "output_summary",
    "param_grad",
    "phase",
    "root_forward",
    "root_forward_pre",
    "select",
    "step_done",
    "step_post",
    "step_pre",
    "succeed",
    "suspect",
    "tick",
    "unconfigure",
]
