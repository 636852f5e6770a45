"""The Trainer of Hugging Face: gradient accumulation, an evaluation after each epoch, a short last step.

Follows huggingface.co/docs/transformers/training.
"""

import tempfile

import torch
from _counted import CALLS
from _report import arguments, finish
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, labels=None):
        CALLS["training" if torch.is_grad_enabled() else "inference"] += 1
        CALLS["samples"] += len(x) if torch.is_grad_enabled() else 0
        logits = self.b(torch.relu(self.a(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, at):
        x = torch.randn(4, generator=torch.Generator().manual_seed(at))
        return {"x": x, "labels": (x.sum() > 0).long()}


class Recorder(TrainerCallback):
    def on_log(self, _args, state, _control, logs=None, **_):
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss'].hex()}", flush=True)
            losses.append(logs["loss"])


losses = []
model = Model()
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder, max_steps=arguments.steps, per_device_train_batch_size=4, gradient_accumulation_steps=4, logging_steps=1,
        eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=Data(), eval_dataset=Data(), callbacks=[Recorder()])
    trainer.train()
finish(model, steps=trainer.state.global_step, micro_batches=15 / 4, loss=losses[-1], samples=CALLS["samples"],
       calls_of={"(root)": CALLS["training"]}, inferred={"(root)": CALLS["inference"]})  # fmt: skip
