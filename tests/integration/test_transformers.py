"""hookd in the Trainer of Hugging Face, and around a loop of Accelerate: the real libraries."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import hookd
from hookd.target.boot import bootstrap
from tests.support.examples import examples

missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.load,  # `make long` installs what it is about
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.filterwarnings("default"),  # theirs are not ours to mend
]
TORCHS_OWN = nn.Module.__call__
OF_THE_CLOCK = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.arange(index, index + 6) % 32
        return {"input_ids": ids, "labels": ids}


@pytest.fixture
def made(tmp_path):
    """Return a function that makes a Trainer of a small GPT-2 with these callbacks."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    def make(name, *callbacks):
        set_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2))
        arguments = TrainingArguments(
            str(tmp_path / name), max_steps=6, per_device_train_batch_size=4, logging_steps=1, save_steps=3,
            report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        return Trainer(model, arguments, train_dataset=Words(), callbacks=list(callbacks))

    return make


def fingerprint(trainer):
    reported = [{k: v for k, v in one.items() if k not in OF_THE_CLOCK} for one in trainer.state.log_history]
    digest = hashlib.sha256(json.dumps(reported).encode())
    for tensor in (*trainer.model.parameters(), torch.get_rng_state()):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def raising(at, error):
    from transformers import TrainerCallback

    class Raising(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == at:
                raise error

    return Raising()


def test_the_callback_leaves_bits_and_checkpoints_as_they_are(made, tmp_path):
    from hookd.integrations.transformers import HookdCallback

    without = made("without")
    without.train()
    callback = HookdCallback([("nan", {"every": 1}), "timing", ("activations", {"every": 1})], run="tiny")
    observed = made("with", callback)
    output = observed.train()
    assert output.global_step == 6
    assert fingerprint(observed) == fingerprint(without)
    assert nn.Module.__call__ is TORCHS_OWN
    assert bootstrap.attached() is None
    files = [sorted(str(p.relative_to(tmp_path / n)) for p in (tmp_path / n).rglob("*")) for n in ("with", "without")]
    assert files[0] == files[1]
    assert not [path for path in (tmp_path / "with").rglob("*") if path.is_file() and b"hookd" in path.read_bytes()]
    report = callback.report
    assert (report["step"]["counted"], report["identity"]["run"], report["incidents"]) == (6, "tiny", [])
    rows = {row["name"]: row for row in report["modules"]}
    assert rows["transformer.h.1.attn.c_attn"]["metrics"]["timing"]["forward_calls"] == 6
    assert {one["name"]: one["errors"] for one in report["plugins"]} == {"nan": 0, "timing": 0, "activations": 0}


@pytest.mark.parametrize("error", [RuntimeError("mine"), pytest.param(KeyboardInterrupt(), marks=pytest.mark.load)])
def test_a_training_that_raises_is_let_go_and_can_be_observed_again(made, error):
    from hookd.integrations.transformers import HookdCallback

    callback = HookdCallback(["timing"])
    failing = raising(2, error)
    trainer = made("raises", callback, failing)
    with pytest.raises(type(error)):
        trainer.train()
    assert nn.Module.__call__ is TORCHS_OWN
    assert callback.report["step"]["counted"] == 2
    trainer.remove_callback(failing)
    trainer.train()
    assert callback.report["step"]["counted"] == 6
    assert bootstrap.attached() is None


def test_the_first_nan_is_named_in_the_report(made):
    from transformers import TrainerCallback

    from hookd.integrations.transformers import HookdCallback

    class Breaking(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 3:
                nn.init.constant_(model.transformer.h[1].mlp.c_proj.bias, float("nan"))

    callback = HookdCallback([("nan", {"every": 1})])
    made("nan", callback, Breaking()).train()
    first = callback.report["incidents"][0]
    assert (first["kind"], first["module"]) == ("nan", "transformer.h.1.mlp.c_proj")


def test_one_that_is_added_later_and_a_with_around_it_do_the_same(made):
    from hookd.integrations.transformers import HookdCallback

    callback = HookdCallback(["timing"])
    trainer = made("later")
    trainer.add_callback(callback)
    trainer.train()
    assert callback.report["step"]["counted"] == 6
    with pytest.raises(RuntimeError), hookd.observe(["timing"]) as seen:
        made("around", raising(2, RuntimeError("mine"))).train()
    assert seen.report["step"]["counted"] == 2
    assert nn.Module.__call__ is TORCHS_OWN


def test_a_plugin_that_is_not_there_is_reported_before_the_first_step(made):
    from hookd.integrations.transformers import HookdCallback

    with pytest.raises(hookd.PluginError, match="no plugin 'typo'"):
        made("typo", HookdCallback(["typo"])).train()
    assert bootstrap.attached() is None


def accelerated():
    """A loop as the documents of Accelerate have it."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    digest = hashlib.sha256()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            digest.update(loss.detach().numpy().tobytes())
    for tensor in (*model.parameters(), torch.get_rng_state()):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def test_a_loop_of_accelerate_leaves_the_same_bits_and_counts_its_own_steps():
    plain = accelerated()
    with hookd.observe([("nan", {"every": 1}), "timing"]) as seen:
        assert accelerated() == plain
    assert nn.Module.__call__ is TORCHS_OWN
    assert seen.report["step"]["counted"] == 4  # of eight batches, two at a time
    assert seen.report["modules"][0]["metrics"]["timing"]["forward_calls"] == 8


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
def test_the_example_of_the_documents_prints_what_stands_below_it(library, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for example in examples("integrations.md", library):
        example.run(capsys)


@pytest.mark.load
def test_each_rank_of_a_trainer_tells_of_itself(tmp_path):
    (example,) = examples("integrations.md", "transformers")
    reported = 'print("rank", *(callback.report["identity"][key] for key in ("rank", "world_size")))'
    (tmp_path / "train.py").write_text(f"{example.code}\n{reported}\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == ["rank 0 2", "rank 1 2"]
