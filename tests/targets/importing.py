"""Trains for ever, and between steps answers the lines of its stdin, each with one line of JSON after `answer `.

`modules` returns the names in `sys.modules`, `import NAME…` imports modules and returns their files or the error, and
`id NAME…` returns the identities of those modules.
"""

import importlib
import json
import select
import sys

import torch
from torch import nn


def answer(word, *names):
    if word == "modules":
        return sorted(sys.modules)
    if word == "id":
        return [id(sys.modules[name]) for name in names]
    try:
        return [importlib.import_module(name).__file__ for name in names]
    except ImportError as error:
        return repr(error)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
print("ready", flush=True)
while True:
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if select.select([sys.stdin], [], [], 0.001)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        print("answer", json.dumps(answer(*line.split())), flush=True)
