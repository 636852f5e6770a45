"""A generator and a discriminator, each with its optimizer, that take turns.

Follows github.com/pytorch/examples/blob/main/dcgan/main.py.
"""

import torch
from _report import finish, steps, tell
from torch import nn

generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
of_g, of_d = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (generator, discriminator))
criterion = nn.BCEWithLogitsLoss()
one, zero = torch.ones(8, 1), torch.zeros(8, 1)
for step in steps():
    of_d.zero_grad()
    made = generator(torch.randn(8, 2))
    loss = criterion(discriminator(torch.randn(8, 4)), one) + criterion(discriminator(made.detach()), zero)
    loss.backward()
    of_d.step()
    of_g.zero_grad()
    criterion(discriminator(made), one).backward()
    of_g.step()
    tell(step, loss)
finish(generator, discriminator, steps=step)
