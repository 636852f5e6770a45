"""Each parameter has an optimizer of its own, which steps inside of the backward as soon as the gradient is there.

Follows pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html.
"""

import torch
from _report import finish, norms, steps, tell
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}
before = {}


def update(parameter):
    optimizers[parameter].step()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
samples = 0
for step in steps():
    model.zero_grad()
    weights = {name: norm for name, (_, norm) in norms(**{"0": model[0], "2": model[2]}).items()}
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    found = {name: [norm, weights[name]] for name, (norm, _) in norms(**{"0": model[0], "2": model[2]}).items()}
    samples += 8
    tell(step, loss)
finish(model, steps=step, samples=samples, norms=found)
