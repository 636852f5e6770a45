"""A LightningModule that is fitted: accumulated gradients, and a validation after each epoch.

Follows lightning.ai/docs/pytorch/stable/starter/introduction.html.
"""

import lightning
import torch
from _counted import CALLS, Counted
from _report import arguments, finish, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(Counted, nn.Sequential):
    pass


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, _):
        losses.append(nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :1]))
        tell(len(losses), losses[-1].detach())
        return losses[-1]

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


losses, module = [], Module()
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
trainer = lightning.Trainer(
    max_steps=arguments.steps, accumulate_grad_batches=2, accelerator="cpu", devices=1, logger=False, barebones=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, loader, loader)
finish(module, steps=trainer.global_step, micro_batches=2, loss=torch.stack(losses[-2:]).mean().item(), samples=CALLS["samples"],
       calls_of={"(root)": CALLS["training"]}, inferred={"(root)": CALLS["inference"]})  # fmt: skip
