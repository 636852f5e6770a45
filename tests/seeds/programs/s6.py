"""S6: a trace of any kind is the same, and nothing of ours is in it."""

import warnings

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

warnings.simplefilter("ignore")  # jit is deprecated


class Inner(nn.Module):
    def forward(self, x):
        print("tracing", torch._C._get_tracing_state() is not None)
        return torch.relu(x) * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.inner, self.drop = nn.Linear(3, 3), Inner(), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.inner(self.fc(x)) + x)


class Scriptable(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x).relu()


def show(title, value):
    print("==", title)
    print(value)


torch.manual_seed(0)
net, plain, x = Net().eval(), Scriptable(), torch.ones(2, 3)
show("before", net(x).tolist())
traced = torch.jit.trace(net, x)
show("jit.trace", traced.graph)
show("jit.trace inlined", traced.inlined_graph)
show("jit.trace code", traced.code)
show("its result", traced(x).tolist())
scripted = torch.jit.script(plain)
show("jit.script", scripted.code)
show("its result", scripted(x).tolist())
graph = fx.symbolic_trace(plain)
show("fx", graph.code)
show("its result", graph(x).tolist())
show("make_fx", make_fx(plain)(x).code)
with torch.no_grad():
    exported = torch.export.export(plain, (x,))
show("export", exported.graph)
show("its result", exported.module()(x).tolist())
show("vmap", torch.func.vmap(plain)(torch.ones(4, 3)).tolist())
show("functional_call", torch.func.functional_call(plain, {"fc.bias": torch.zeros(3)}, (x,)).tolist())
value = torch.func.grad(lambda parameters: torch.func.functional_call(plain, parameters, (x,)).sum())
show("grad", {name: g.tolist() for name, g in value(dict(plain.named_parameters())).items()})
with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
    show("fake", type(plain(torch.ones(2, 3))).__name__)
show("meta", tuple(Scriptable().to("meta")(torch.ones(2, 3, device="meta")).shape))
show("after", net(x).tolist())
