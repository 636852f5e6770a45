"""Two plugins that replace gradients, as the hooks in programs/s4.py do."""

import torch

from hookd import Plugin, hookimpl


class Gradient(Plugin):
    """Replaces the gradient of every input: option how=ones or how=clamp."""

    name = "gradient"
    mutates = True

    @hookimpl
    def configure(self, context):
        how = context.option("how", "ones", choices=("ones", "clamp"))
        self.change = torch.ones_like if how == "ones" else lambda g: g.clamp(-1, 1)

    @hookimpl
    def select(self, module):
        return module.type.startswith("Chosen") or (module.type == "Linear" and module.depth == 0)

    @hookimpl
    def backward(self, grad_input):
        return tuple(None if g is None else self.change(g) for g in grad_input)


class Output(Plugin):
    """Triples the gradient of every output."""

    name = "output"
    mutates = True

    @hookimpl
    def select(self, module):
        return module.type.startswith("Chosen")

    @hookimpl
    def backward_pre(self, grad_output):
        changed = tuple(None if g is None else g * 3 for g in grad_output)
        return changed[0] if len(changed) == 1 else changed  # a single tensor is wrapped into a tuple


class Halve(Plugin):
    """Halves the gradient of every output of the modules right below a root."""

    name = "halve"
    mutates = True

    @hookimpl
    def select(self, module):
        return module.depth == 1

    @hookimpl
    def backward_pre(self, grad_output):
        return tuple(None if g is None else g / 2 for g in grad_output)
