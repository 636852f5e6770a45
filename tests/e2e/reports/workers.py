"""Batches come from worker processes of a DataLoader, over several epochs.

Follows pytorch.org/tutorials/beginner/basics/data_tutorial.html.
"""

import itertools

import torch
from _counted import CALLS, Counted
from _report import finish, steps, tell
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Model(Counted, nn.Sequential):
    pass


class Data(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, at):
        x = torch.randn(4, generator=torch.Generator().manual_seed(at))
        return x, (x.sum() > 0).long()


if __name__ == "__main__":
    model = Model(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(
        Data(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step in steps():
        x, y = next(batches)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(step, loss)
    finish(
        model,
        steps=step,
        micro_batches=1,
        loss=loss.item(),
        samples=CALLS["samples"],
        calls_of={"(root)": CALLS["training"]},
    )
