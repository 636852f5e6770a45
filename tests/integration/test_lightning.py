"""hookd in a Trainer of Lightning: the real library."""

from __future__ import annotations

import hashlib
import importlib.util

import pytest
import torch
from torch import nn

from hookd.target.boot import bootstrap
from tests.support.examples import examples

pytestmark = [
    pytest.mark.load,  # `make long` installs what it is about
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="not installed: lightning"),
    pytest.mark.filterwarnings("default"),  # theirs are not ours to mend
]
TORCHS_OWN = nn.Module.__call__


@pytest.fixture
def fitted(tmp_path):
    """Return a function that trains a small module with these callbacks; it returns trainer and losses."""
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self, bad):
            super().__init__()
            self.body, self.bad, self.losses = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), bad, []

        def training_step(self, batch, index):
            if index == self.bad:
                nn.init.constant_(self.body[2].bias, float("nan"))
            loss = self.body(batch).pow(2).mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    def fit(name, *callbacks, bad=None):
        lightning.seed_everything(0, verbose=False)
        net = Net(bad)
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=6, logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path / name, callbacks=list(callbacks),
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4))
        return trainer, net

    return fit


def fingerprint(net):
    digest = hashlib.sha256()
    for tensor in (*net.losses, *net.parameters(), torch.get_rng_state()):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def test_the_callback_leaves_bits_and_checkpoints_as_they_are(fitted, tmp_path):
    from hookd.integrations.lightning import HookdCallback

    _, without = fitted("without")
    expected = fingerprint(without)
    callback = HookdCallback([("nan", {"every": 1}), "timing", ("activations", {"every": 1})], run="tiny")
    _, observed = fitted("with", callback)
    assert fingerprint(observed) == expected
    assert nn.Module.__call__ is TORCHS_OWN
    assert bootstrap.attached() is None
    (saved,) = (tmp_path / "with").rglob("*.ckpt")
    assert b"hookd" not in saved.read_bytes()
    report = callback.report
    assert (report["step"]["counted"], report["identity"]["run"], report["incidents"]) == (6, "tiny", [])
    rows = {row["name"]: row for row in report["modules"]}
    assert rows["0"]["metrics"]["timing"]["forward_calls"] == 6
    assert {one["name"]: one["errors"] for one in report["plugins"]} == {"nan": 0, "timing": 0, "activations": 0}


def test_a_fit_that_raises_is_let_go(fitted):
    import lightning

    from hookd.integrations.lightning import HookdCallback

    class Raising(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 2:
                raise RuntimeError("mine")

    callback = HookdCallback(["timing"])
    with pytest.raises(RuntimeError, match="mine"):
        fitted("raises", callback, Raising())
    assert nn.Module.__call__ is TORCHS_OWN
    assert bootstrap.attached() is None
    assert callback.report["step"]["counted"] == 2


def test_the_first_nan_is_named_in_the_report(fitted):
    from hookd.integrations.lightning import HookdCallback

    callback = HookdCallback([("nan", {"every": 1})])
    fitted("nan", callback, bad=3)
    first = callback.report["incidents"][0]
    assert (first["kind"], first["module"]) == ("nan", "2")


def test_the_example_of_the_documents_prints_what_stands_below_it(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for example in examples("integrations.md", "lightning"):
        example.run(capsys)
