"""In-place operations on a module's input and output, BatchNorm, a frozen part, a dict output, channels last."""

import torch
from _steps import parse, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1).requires_grad_(requires_grad=False)
        self.conv, self.norm, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.conv(x))
        y += x
        self.relu(y)
        features = y.mean((2, 3))
        return {"features": features, "logits": self.head(features)}


arguments = parse()
model = Net().to(memory_format=torch.channels_last)


def loss_of(step):
    x = torch.randn(8, 1, 8, 8)
    return nn.functional.cross_entropy(model(x)["logits"], torch.randint(3, (8,)))


parameters = [p for p in model.parameters() if p.requires_grad]
train(arguments, model, loss_of, torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
