"""torch.compile must not notice: no graph break, no recompile at attach, detach, attach again; each case in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

PROGRAM = """
import json, sys
import torch
from torch import nn
import hookd
import torch._dynamo
from torch._dynamo.utils import counters

order, kind, backend_name, hooked = sys.argv[1:5]
torch.manual_seed(0)
graphs = 0

def backend(gm, example):
    global graphs
    graphs += 1
    return gm.forward if backend_name == "eager" else torch._dynamo.lookup_backend(backend_name)(gm, example)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
    def forward(self, x):
        return self.n(x + self.b(torch.relu(self.a(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.blocks(x))

net = Net()
if hooked == "hooked":
    net.head.register_forward_hook(lambda m, i, o: o * 1)
opt = torch.optim.AdamW(net.parameters())
never = order == "never"
stop = (lambda: None) if never else hookd.stop
ours = (lambda: None) if never else lambda: hookd.start([("nan", {}), ("timing", {"every": 1}), ("activations", {"every": 1})])
if order == "before":
    ours()
if kind == "module":
    run = torch.compile(net, backend=backend, fullgraph=True)
elif kind == "method":
    net.compile(backend=backend, fullgraph=True)
    run = net
elif kind == "regions":
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)
    run = net
else:
    run = torch.compile(lambda x: net(x), backend=backend, fullgraph=True)

def steps(n, batch=4):
    for _ in range(n):
        loss = run(torch.randn(batch, 8)).pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()

steps(3)
seen = [graphs]
if order == "after":
    ours(); steps(3)
seen.append(graphs)
stop(); steps(3)
seen.append(graphs)
ours(); steps(3)
seen.append(graphs)
steps(2, batch=6)  # a new shape: the first legitimate recompile traces with us in place
shape = graphs - seen[-1]
stop(); steps(2, batch=6)
print(json.dumps({"graphs": seen, "shape": shape, "last": graphs - seen[-1] - shape,
                  "breaks": sum(counters["graph_break"].values())}))
"""


PIECES = """
import json, sys
import torch
from torch import nn
import hookd
import torch._dynamo
from torch._dynamo.utils import counters

order, kind = sys.argv[1:3]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.ReLU()
        self.fc.register_forward_hook(lambda module, inputs, output: None)
    def forward(self, x):
        return x + self.act(self.fc(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

net = Net()
if order == "before":
    hookd.start()
if kind == "method":
    for block in net.blocks:
        block.compile(backend="eager")
else:
    net.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in net.blocks)
opt = torch.optim.SGD(net.parameters(), 0.1)
seen = []

def steps(batch):
    for _ in range(3):
        opt.zero_grad(); net(torch.randn(batch, 8)).sum().backward(); opt.step()
    seen.append(dict(counters["frames"]))

steps(4)
if order == "after":
    hookd.start()
for batch in (4, 6, 7):
    steps(batch)
if order != "never":
    hookd.stop()
for batch in (7, 9):
    steps(batch)
print(json.dumps({"frames": seen, "breaks": sum(counters["graph_break"].values())}))
"""

COMPILED_AUTOGRAD = """
import json, sys
import torch
from torch import nn
import hookd
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

is_hooked, kind = sys.argv[1] == "hooked", sys.argv[2]
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(4, 8)
if kind == "late":  # the graph is made before anybody knows that its backward will be compiled
    if is_hooked:
        hookd.start([("nan", {"every": 1}), ("timing", {"every": 1}), ("activations", {"every": 1})])
    loss = model(x).sum()
for step in range(6):
    if is_hooked and step == 2 and kind != "late":
        hookd.start([("nan", {"every": 1}), ("timing", {"every": 1}), ("activations", {"every": 1})])
    opt.zero_grad()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=kind != "partial")):
        if kind == "late":
            if step == 0:
                loss.backward()
        else:
            model(x).sum().backward()
    opt.step()
grads = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
print(json.dumps({"frames": dict(counters["frames"]), "breaks": sum(counters["graph_break"].values()),
                  "captures": 0 if kind == "late" else counters["compiled_autograd"]["captures"], "grads": len(grads)}))
"""


def compiled(*argv: str, program: str = PROGRAM) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@cache
def plain(*argv: str) -> dict[str, object]:
    return compiled("never", *argv)


@pytest.mark.parametrize(
    "kind", ["module", *(pytest.param(one, marks=pytest.mark.load) for one in ("method", "regions", "function"))]
)
def test_no_break_and_no_recompile_of_what_is_compiled_after_the_attach(kind: str) -> None:
    assert_no_break("after", kind)


@pytest.mark.parametrize(
    "kind", ["module", *(pytest.param(one, marks=pytest.mark.load) for one in ("method", "regions", "function"))]
)
def test_no_break_and_no_recompile_of_what_was_compiled_before(kind: str) -> None:
    assert_no_break("before", kind)


def assert_no_break(order: str, kind: str) -> None:
    assert compiled(order, kind, "eager", "plain") == plain(kind, "eager", "plain")


@pytest.mark.load
@pytest.mark.parametrize("order", ["after", "before"])
def test_a_module_with_a_hook_of_its_own(order: str) -> None:
    assert compiled(order, "module", "aot_eager", "hooked") == plain("module", "aot_eager", "hooked")


@pytest.mark.load
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("kind", ["method", "wrapper"])
def test_blocks_compiled_one_by_one_with_hooks_of_their_own_share_their_frames(order: str, kind: str) -> None:
    assert compiled(order, kind, program=PIECES) == plain_pieces(kind)


@cache
def plain_pieces(kind: str) -> dict[str, object]:
    return compiled("never", kind, program=PIECES)


@pytest.mark.parametrize("kind", ["full", *(pytest.param(one, marks=pytest.mark.load) for one in ("partial", "late"))])
def test_compiled_autograd_sees_nothing_of_ours(kind: str) -> None:
    assert compiled("hooked", kind, program=COMPILED_AUTOGRAD) == compiled("plain", kind, program=COMPILED_AUTOGRAD)
