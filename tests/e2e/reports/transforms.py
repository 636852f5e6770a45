"""A forward that differentiates its own layers: vmap, grad, jvp and functional_call of torch.func.

Follows pytorch.org/tutorials/intermediate/per_sample_grads.html.
"""

import torch
from _report import finish, steps, tell
from torch import nn
from torch.func import functional_call, grad, jvp, vmap


class Physical(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def energy(self, x):
        return self.b(torch.tanh(self.a(x))).sum()

    def forward(self, x):
        force = vmap(grad(self.energy))(x)
        out, tangent = jvp(self.a, (x,), (torch.ones_like(x),))
        again = functional_call(self.a, dict(self.a.named_parameters()), (x,))
        return self.b(force + out + again + tangent)


model = Physical()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in steps():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    tell(step, loss)
finish(model, steps=step)
