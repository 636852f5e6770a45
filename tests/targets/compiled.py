"""torch.compile with fullgraph=True, of a model, of a part and of a function; new shapes come all the time.

A step's line says how many graphs dynamo has compiled so far: whoever causes a break or a recompile shows there.
"""

import torch
from _steps import parse, train
from torch import nn
from torch._dynamo.utils import counters


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 1)

    def forward(self, x):
        return self.fc(x).square().mean()


@torch.compile(backend="eager", fullgraph=True, dynamic=False)
def through(head, x):
    return head(x)


def loss_of(step):
    x = torch.randn(4 + step // 10, 8)  # a new shape every ten steps
    loss = through(head, whole(part(x)))
    print(f"graphs {counters['stats']['unique_graphs']} breaks {sum(counters['graph_break'].values())}", flush=True)
    return loss


arguments = parse()
whole, part, head = nn.Sequential(Part(), Part()), Part(), Head()
model = nn.ModuleList([whole, part, head])
whole = torch.compile(whole, backend="eager", fullgraph=True, dynamic=False)
part.compile(backend="eager", fullgraph=True, dynamic=False)
train(arguments, model, loss_of)
