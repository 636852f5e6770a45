"""LoRA by peft: the base model is frozen, only the adapters are trained.

Follows huggingface.co/docs/peft/developer_guides/custom_models.
"""

import torch
from _report import finish, steps, tell
from peft import LoraConfig, get_peft_model
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.hidden, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(torch.relu(self.inputs(x)))))


config = LoraConfig(target_modules=["inputs", "hidden"], modules_to_save=["head"], r=2, lora_dropout=0.1)
model = get_peft_model(Model(), config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in steps():
    x = torch.randn(8, 4)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(step, loss)
finish(model, steps=step, micro_batches=1, loss=loss.item(), samples=8 * step, calls_of={"(root)": step})
