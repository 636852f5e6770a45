"""Attention and a mixture of experts, with gradients of two micro-batches accumulated; data and dropout from one generator."""

import torch
from _steps import parse, train
from torch import nn
from torch.nn import functional

MICRO, WIDTH = 2, 64
arguments = parse()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.gate, self.out = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = self.encoder(x)
        scores, chosen = self.gate(x).softmax(-1).topk(2, -1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        picked = every.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, WIDTH))
        return self.out((picked * scores.unsqueeze(-1)).sum(-2))


net = Net()


def micro_loss():
    x = torch.randn(8, 64, WIDTH)
    return functional.cross_entropy(net(x).flatten(0, 1), torch.randint(8, (512,))) / MICRO


def loss_of(_step):
    for _ in range(MICRO - 1):
        micro_loss().backward()
    return micro_loss()


train(arguments, net, loss_of)
