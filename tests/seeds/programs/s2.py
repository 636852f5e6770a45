"""S2: torch's global hooks run before the module's own, in every phase."""

import torch
from torch import nn
from torch.nn.modules import module as registry


def say(what):
    return lambda *_: print(what)


class Layer(nn.Module):
    def forward(self, x):
        print("forward")
        return x * 2


layer = Layer()
layer.register_forward_pre_hook(say("own pre-hook"))
layer.register_forward_hook(say("own hook"))
layer.register_full_backward_pre_hook(say("own backward pre-hook"))
layer.register_full_backward_hook(say("own backward hook"))
handles = [
    registry.register_module_forward_pre_hook(say("global pre-hook")),
    registry.register_module_forward_hook(say("global hook")),
    registry.register_module_full_backward_pre_hook(say("global backward pre-hook")),
    registry.register_module_full_backward_hook(say("global backward hook")),
]
a = torch.ones(2, requires_grad=True)
layer(a).sum().backward()
for handle in handles:
    handle.remove()
print("without the global ones")
layer(a).sum().backward()
print("gradient", a.grad.tolist())
