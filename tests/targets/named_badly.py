"""A small net whose modules, and whose class, have names that would run in a browser that takes them for HTML."""

import torch
from _steps import parse, train
from torch import nn

EVIL = """"><script>document["title"]="run"</script><img src=x onerror='document["title"]="run"'>"""

arguments = parse()
block = type(EVIL, (nn.Sequential,), {})
model = nn.Sequential()
model.add_module("embed", nn.Linear(16, 16))
model.add_module(EVIL, block(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)))
train(arguments, model, lambda step: model(torch.randn(32, 16)).square().mean() + 1.0)
