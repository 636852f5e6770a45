"""The Trainer of Hugging Face with a language model: the loss of a micro-batch is divided by the tokens of all of them.

Follows huggingface.co/docs/transformers/tasks/language_modeling, on a model of two small layers.
"""

import tempfile

import torch
from _report import arguments, finish
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, at):
        generator = torch.Generator().manual_seed(at)
        ids = torch.randint(3, 100, (16,), generator=generator)
        prompt = int(torch.randint(12, (1,), generator=generator))
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) < prompt, -100)}


class Recorder(TrainerCallback):
    def on_log(self, _args, state, _control, logs=None, **_):
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss'].hex()}", flush=True)
            losses.append(logs["loss"])


losses = []
size = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, **size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder, max_steps=arguments.steps, per_device_train_batch_size=2, gradient_accumulation_steps=4, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=Data(), callbacks=[Recorder()])
    trainer.train()
finish(model, steps=trainer.state.global_step, micro_batches=4.0, loss=losses[-1])
