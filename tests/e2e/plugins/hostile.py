"""Plugins as nobody should write them: training has to go on all the same, and to the same weights."""

import sys
import time

import torch

from hookd import Plugin, hookimpl


class Hostile(Plugin):
    """Does the same thing at every event."""

    def act(self):
        raise NotImplementedError

    @hookimpl
    def forward_pre(self, module, inputs):
        return self.act()

    @hookimpl
    def forward(self, module, output):
        return self.act()

    @hookimpl
    def backward_pre(self, module, grad_output):
        return self.act()

    @hookimpl
    def backward(self, module, grad_input):
        return self.act()

    @hookimpl
    def param_grad(self, param, grad):
        return self.act()

    @hookimpl
    def loss(self, tensors):
        return self.act()

    @hookimpl
    def loss_done(self):
        return self.act()

    @hookimpl
    def step_pre(self, optimizer):
        return self.act()

    @hookimpl
    def step_post(self, optimizer):
        return self.act()

    @hookimpl
    def mode(self, module):
        return self.act()

    @hookimpl
    def tick(self):
        return self.act()


class Raises(Hostile):
    name = "raises"

    def act(self):
        raise ValueError("of the plugin's own making")


class Exits(Hostile):
    name = "exits"

    def act(self):
        sys.exit(3)


class Recurses(Hostile):
    name = "recurses"

    def act(self):
        self.act()


class Returns(Hostile):
    """An observer has nothing to return."""

    name = "returns"

    def act(self):
        return (torch.full((1,), float("nan")),)


class Calls(Plugin):
    """Calls modules of its own, and the observed one again, from inside the observation."""

    name = "calls"

    @hookimpl
    def configure(self, context):
        self.calls = context.counter("calls", "Calls of this plugin's own.")
        self.own = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())

    @hookimpl
    def forward_pre(self, module, inputs):
        self.act()

    @hookimpl
    def forward(self, module, inputs, output):
        self.act()
        if module.type in {"Linear", "Tanh"}:
            module.torch()(inputs[0])

    @hookimpl
    def backward_pre(self, module, grad_output):
        self.act()

    @hookimpl
    def param_grad(self, grad):
        self.act()

    @hookimpl
    def step_pre(self, optimizer):
        self.act()

    def act(self):
        self.own(torch.zeros(2))
        self.calls.inc()


class Sleeps(Hostile):
    name = "sleeps"

    def act(self):
        time.sleep(0.004)


class SelectRaises(Plugin):
    name = "select_raises"

    @hookimpl
    def select(self, module):
        raise KeyError(module.name)

    @hookimpl
    def forward(self, module):
        raise AssertionError("it was never selected")


class LeaveRaises(Plugin):
    name = "leave_raises"

    @hookimpl
    def unconfigure(self):
        raise OSError("no way to leave")


class ConfigureRaises(Plugin):
    name = "configure_raises"

    @hookimpl
    def configure(self, context):
        raise OSError("no way to begin")


class Leaks(Plugin):
    """Leaves torch's modes changed behind it."""

    name = "leaks"

    @hookimpl
    def forward_pre(self, module, inputs):
        torch.set_grad_enabled(False)

    @hookimpl
    def forward(self, module, output):
        torch.set_grad_enabled(True)
