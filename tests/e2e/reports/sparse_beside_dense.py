"""SparseAdam for an embedding and Adam for the rest; the same row is looked up several times in a batch.

Follows github.com/pytorch/pytorch/issues/18404.
"""

import torch
from _report import finish, norms, steps, tell
from torch import nn


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, words):
        return self.head(self.embedding(words).mean(1))


model = Bag()
sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=1e-2)
dense = torch.optim.Adam(model.head.parameters(), lr=1e-2)
samples = 0
for step in steps():
    sparse.zero_grad()
    dense.zero_grad()
    words = torch.randint(20, (6, 10))
    loss = (model(words) - 1).square().mean()
    loss.backward()
    found = norms(embedding=model.embedding, head=model.head)
    sparse.step()
    dense.step()
    samples += len(words)
    tell(step, loss)
finish(model, steps=step, samples=samples, norms=found)
