"""Nothing is trained: batches go through a model.

Follows pytorch.org/tutorials/beginner/saving_loading_models.html.
"""

import torch
from _report import finish, steps, tell
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
with torch.inference_mode():
    for step in steps():
        tell(step, model(torch.randn(8, 4)).sum())
finish(model, steps=0, calls=step)
