"""DataLoader workers whose data set calls modules, forked anew every ten steps, so also after an attach."""

import torch
from _steps import parse, train
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Items(Dataset):
    def __init__(self):
        self.transform = nn.Sequential(nn.Unflatten(0, (4, 4)), nn.Flatten(0))

    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        return self.transform(torch.randn(16, generator=torch.Generator().manual_seed(i)))


def loss_of(step):
    global batches
    if step % 10 == 1:
        batches = iter(loader)
    x = next(batches)
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


if __name__ == "__main__":
    arguments = parse(method="fork")
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    loader = DataLoader(Items(), batch_size=8, num_workers=2, multiprocessing_context=arguments.method)
    train(arguments, model, loss_of)
