"""An observer that asks for every hook with every argument, and looks at all of it."""

import torch

from hookd import Plugin, hookimpl, tensors


class Everything(Plugin):
    name = "everything"

    @hookimpl
    def configure(self, context):
        self.context = context
        events = context.counter("events", "Events that were passed on.", ["event"])
        names = "select forward_pre forward forward_error backward_pre backward param_grad loss loss_done step_pre"
        self.count = {
            name: events.labels(name) for name in [*names.split(), "step_post", "phase", "mode", "tick", "recompute"]
        }
        self.seen = context.gauge("seen", "Sum of what was looked at last.", ["module"])

    @hookimpl
    def select(self, module):
        self.count["select"].inc()
        return True

    def look(self, event, module, value):
        self.count[event].inc()
        found = [t for t in tensors(value) if t.is_floating_point() and not t.is_meta]
        self.seen.labels(module.name).set(float(sum(t.detach().sum() for t in found)) if found else 0.0)

    @hookimpl
    def forward_pre(self, module, inputs, kwargs, recompute):
        self.look("forward_pre", module, (inputs, kwargs))
        assert self.context.stack()[-1] is module
        if recompute:
            self.count["recompute"].inc()

    @hookimpl
    def forward(self, module, inputs, kwargs, output, elapsed_ns, self_ns, recompute):  # noqa: PLR0917
        self.look("forward", module, output)
        assert not torch.is_grad_enabled()
        assert 0 <= self_ns <= elapsed_ns

    @hookimpl
    def forward_error(self, module, error):
        self.count["forward_error"].inc()

    @hookimpl
    def backward_pre(self, module, grad_output):
        self.look("backward_pre", module, grad_output)

    @hookimpl
    def backward(self, module, grad_input, grad_output, elapsed_ns, self_ns):  # noqa: PLR0917
        self.look("backward", module, grad_input)
        assert elapsed_ns >= 0
        assert self_ns >= 0

    @hookimpl
    def param_grad(self, module, name, param, grad):
        self.look("param_grad", module, grad)
        assert grad.shape == param.shape

    @hookimpl
    def loss(self, tensors):
        self.count["loss"].inc()

    @hookimpl
    def loss_done(self, elapsed_ns):
        self.count["loss_done"].inc()

    @hookimpl
    def step_pre(self, optimizer, step):
        self.count["step_pre"].inc()
        assert self.context.ordered_parameters(optimizer)

    @hookimpl
    def step_post(self, optimizer, step, elapsed_ns):
        self.count["step_post"].inc()

    @hookimpl
    def phase(self, name, now_ns):
        self.count["phase"].inc()

    @hookimpl
    def mode(self, module, training):
        self.count["mode"].inc()

    @hookimpl
    def tick(self, now_s):
        self.count["tick"].inc()
