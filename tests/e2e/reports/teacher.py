"""A student learns from a larger teacher, which is frozen and in `eval()`.

Follows pytorch.org/tutorials/beginner/knowledge_distillation_tutorial.html.
"""

import torch
from _counted import CALLS, Counted
from _report import finish, steps, tell
from torch import nn


class Student(Counted, nn.Sequential):
    pass


teacher = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)).eval().requires_grad_(False)
student = Student(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
criterion = nn.KLDivLoss(reduction="batchmean")
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for step in steps():
    x = torch.randn(8, 4)
    logits = student(x)
    with torch.no_grad():
        target = teacher(x).softmax(1)
    loss = criterion(logits.log_softmax(1), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(step, loss)
finish(student, teacher, steps=step, micro_batches=1, loss=loss.item(), samples=CALLS["samples"],
       calls_of={"(root)": CALLS["training"], "#KLDivLoss.(root)": step}, inferred={"#Sequential.(root)": step})  # fmt: skip
