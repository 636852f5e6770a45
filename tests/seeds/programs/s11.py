"""S11: a LeNet called as `model(x)` reaches every layer in order."""

import torch
from torch import nn


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c3 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.sig, self.s2, self.flatten = nn.Sigmoid(), nn.AvgPool2d(2), nn.Flatten()
        self.f5, self.f6, self.f7 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = self.s2(self.sig(self.c1(x)))
        x = self.s2(self.sig(self.c3(x)))
        return self.f7(self.f6(self.f5(self.flatten(x))))


torch.manual_seed(0)
torch.set_num_threads(1)
model, x = LeNet(), torch.rand(1, 3, 32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    y = model(x)
    print(tuple(y.shape), [format(value, ".9g") for value in y.flatten().tolist()])
    optimizer.zero_grad()
    y.square().sum().backward()
    optimizer.step()
