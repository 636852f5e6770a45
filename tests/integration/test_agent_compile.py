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


def compiled(*argv: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@cache
def plain(*argv: str) -> dict[str, object]:
    return compiled("never", *argv)


@pytest.mark.parametrize(
    "kind", ["module", "function", *(pytest.param(one, marks=pytest.mark.load) for one in ("method", "regions"))]
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


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_module_with_a_hook_of_its_own(order: str) -> None:
    assert compiled(order, "module", "aot_eager", "hooked") == plain("module", "aot_eager", "hooked")
