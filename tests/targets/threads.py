"""Four threads call modules of their own while the main thread trains; one backward runs in a thread too."""

import threading

import torch
from _steps import parse, train
from torch import nn

arguments = parse()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
others = [nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(4)]
stop = threading.Event()
failures = []


def evaluate(other):
    try:
        while not stop.wait(0.002):
            with torch.no_grad():
                other(torch.zeros(2, 4))
    except BaseException as error:
        failures.append(error)
        raise


def loss_of(step):
    x = torch.randn(8, 8)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    extra = nn.functional.mse_loss(model(-x), x.sum(1, keepdim=True))
    helper = threading.Thread(target=extra.backward)
    helper.start()
    helper.join()
    return loss


threads = [threading.Thread(target=evaluate, args=(other,)) for other in others]
for thread in threads:
    thread.start()
train(arguments, model, loss_of)
stop.set()
for thread in threads:
    thread.join()
assert not failures, failures
