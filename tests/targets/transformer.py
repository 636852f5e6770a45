"""An encoder with dropout, data from the global generator: whoever draws a random number changes the result."""

import torch
from _steps import parse, train
from torch import nn

arguments = parse()
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "out": nn.Linear(16, 4)})


def loss_of(step):
    x = torch.randn(4, 6, 16)
    hidden = model["encoder"](src=x, mask=None)
    return nn.functional.cross_entropy(model["out"](hidden).flatten(0, 1), torch.randint(4, (24,)))


train(arguments, model, loss_of)
