"""S1: `__call__` runs pre-hooks, forward, hooks, and a backward hook on the grad_fn, which is new at every call."""

import torch
from torch import nn


class Layer(nn.Module):
    def forward(self, x):
        print("forward", x.tolist())
        return x * 2


def after(module, inputs, output):
    print("hook", output.tolist())
    output.grad_fn.register_hook(lambda grad_input, grad_output: print("backward", grad_output[0].tolist()))


layer = Layer()
layer.register_forward_pre_hook(lambda module, inputs: print("pre-hook", inputs[0].tolist()))
layer.register_forward_hook(after)
a = torch.tensor([1.0, 2.0], requires_grad=True)
first, second = layer(a), layer(a + 1)
print("a new grad_fn", first.grad_fn is not second.grad_fn)
second.sum().backward()
first.sum().backward()
print("gradient", a.grad.tolist())
print("nothing on the module", sorted(vars(layer)) == sorted(vars(Layer())), len(layer._forward_hooks))
