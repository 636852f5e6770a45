"""hookd_capture writes the guilty call as a bundle, from which it is repeated bit for bit."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hookd_capture.calls import CALM
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from hookd import PluginError
from tests.support.bundles import HUGE, bits, captured, replayed, reported, some, spoil, text_of


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x):
        return self.again(self.second(self.first(x)))


@dataclasses.dataclass
class Settings:
    scale: float
    mask: torch.Tensor


class Configured(nn.Module):
    """Has settings in a dataclass and in a namespace, a tensor that is not a buffer, and a function."""

    def __init__(self):
        super().__init__()
        self.settings = Settings(float("inf"), torch.arange(4.0))
        self.more = SimpleNamespace(type="exp", at=slice(0, 4), names=("a", None), dtype=torch.float32)
        self.activation = functional.gelu
        self.shift = torch.full((4,), 2.0)

    def forward(self, *, batch):
        x = self.activation(batch["x"][:, self.more.at]).to(self.more.dtype)
        return {"out": (x * self.settings.scale, self.settings.mask + self.shift), "type": self.more.type}


class Slow(nn.Module):
    def forward(self, x):
        return functional.dropout(x, 0.5, training=self.training) * HUGE * x


def made(model, *inputs, spoiled=True, **kwargs):
    if spoiled:
        spoil(model)
    return model, lambda: model(*inputs, **kwargs)


def attention():
    x = some(2, 3, 8)
    return made(nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True), x, x, x, need_weights=False)


CALLS = {
    "linear": lambda: made(nn.Linear(4, 3), some(2, 4)),
    "strided": lambda: made(nn.Linear(4, 3), some(4, 6).t()[::2]),
    "expanded": lambda: made(nn.Linear(4, 3), some(4).expand(5, 4)),
    "channels-last": lambda: made(nn.Conv2d(3, 4, 2), some(2, 3, 5, 5).to(memory_format=torch.channels_last)),
    "batchnorm": lambda: made(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), some(6, 4)),
    "attention": attention,
    "encoder": lambda: made(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), some(2, 3, 8)),
    "embedding": lambda: made(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)), torch.tensor([[1, 2], [0, 4]])),
    "bfloat16": lambda: made(nn.Linear(4, 3, dtype=torch.bfloat16), torch.full((2, 4), 3.0, dtype=torch.bfloat16)),
    "complex": lambda: made(nn.Linear(4, 3, dtype=torch.complex64), some(2, 4, dtype=torch.complex64)),
    "conjugate": lambda: made(nn.Linear(4, 3, dtype=torch.complex64), some(2, 4, dtype=torch.complex64).conj()),
    "rnn": lambda: made(nn.RNN(4, 5, num_layers=2, dropout=0.5, nonlinearity="relu"), some(3, 2, 4)),
    "kwargs": lambda: made(nn.Linear(4, 3), input=some(2, 4)),
    "scalar": lambda: made(nn.PReLU(init=-HUGE), torch.tensor(-HUGE), spoiled=False),
    "tied": lambda: made(Tied(), some(2, 4)),
    "dropout": lambda: made(Slow(), torch.rand(4, 64) + 1),
    "configured": lambda: made(Configured(), batch={"x": torch.rand(2, 6)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_made_again_bit_for_bit(hook, tmp_path, name):
    _, call = CALLS[name]()
    bundle = captured(hook, tmp_path, call)
    found = replayed(bundle, allow=[__name__.partition(".")[0], __name__])
    assert found["raised"] is None
    assert (found["is_reproduced"], found["is_bit_equal"], found["notes"]) == (True, True, [])
    assert found["first"] is not None
    assert found["outputs"] == found["recorded"]


def test_the_oracle_reads_the_tensors_of_a_bundle(hook, tmp_path):
    model, call = CALLS["batchnorm"]()
    state = copy.deepcopy(model[0].state_dict())
    bundle = captured(hook, tmp_path, call)
    read = load_file(bundle / "tensors.safetensors")
    assert text_of(bundle)["call"]["module"] == "0"
    assert {name: bits(one) for name, one in state.items()} == {name: bits(read[f"module.{name}"]) for name in state}


def test_random_numbers_are_carried_where_the_module_may_draw_some(hook, tmp_path):
    bundle = captured(hook, tmp_path, CALLS["dropout"]()[1])
    read = load_file(bundle / "tensors.safetensors")
    assert read["state.cpu"].shape == torch.get_rng_state().shape


class TestReports:
    def test_the_incident_has_the_path(self, hook, tmp_path):
        bundle = captured(hook, tmp_path, CALLS["linear"]()[1])
        (incident,) = hook.incidents
        assert (incident.kind, incident.fields["bundle"]) == ("bundle", str(bundle))
        assert (incident.step, incident.module, incident.fields["where"], incident.fields["value"]) == (
            1,
            "(root)",
            "output",
            "inf",
        )
        assert incident.fields["size_bytes"] > 0
        assert "`hookd replay`" in incident.message
        assert text_of(bundle)["incident"]["message"] in incident.message
        assert text_of(bundle)["incident"]["python_stack"] == incident.fields["python_stack"]
        assert any("test_capture.py" in line for line in incident.fields["python_stack"])

    def test_it_is_the_owners_alone(self, hook, tmp_path):
        bundle = captured(hook, tmp_path / "new" / "place", CALLS["linear"]()[1])
        assert stat.S_IMODE((tmp_path / "new" / "place").stat().st_mode) == 0o700
        assert stat.S_IMODE(bundle.stat().st_mode) == 0o700
        assert {stat.S_IMODE(one.stat().st_mode) for one in bundle.iterdir()} == {0o600}

    def test_above_the_limit_nothing_is_written_and_the_incident_says_so(self, hook, tmp_path):
        hook.start("capture", directory=str(tmp_path), bytes=100)
        CALLS["linear"]()[1]()
        hook.stop()
        assert list(tmp_path.iterdir()) == []
        assert hook.incident.kind == "bundle_failed"
        assert "bytes=100" in hook.incident.message
        assert "no bundle was written" in hook.incident.message

    def test_a_full_disk_is_reported(self, hook, tmp_path, monkeypatch):
        free = lambda _path: SimpleNamespace(free=0)  # noqa: E731
        monkeypatch.setattr("hookd_capture.bundle.write.shutil.disk_usage", free)
        hook.start("capture", directory=str(tmp_path))
        CALLS["linear"]()[1]()
        hook.stop()
        assert list(tmp_path.iterdir()) == []
        assert "free" in reported(hook, "bundle_failed")[0].message

    def test_a_directory_that_cannot_be_is_refused_at_once(self, hook, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(PluginError, match="cannot be written to") as refused:
            hook.start("capture", directory=str(tmp_path / "file" / "below"))
        assert "directory=" in refused.value.hint

    def test_the_default_place_is_that_for_a_programs_state(self, hook, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        hook.start("capture")
        CALLS["linear"]()[1]()
        hook.stop()
        assert Path(hook.incidents[0].fields["bundle"]).parent == tmp_path / "hookd" / "bundles"

    def test_where_the_state_cannot_be_written_it_is_the_place_for_temporary_files(self, hook, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        hook.start("capture")
        CALLS["linear"]()[1]()
        hook.stop()
        assert Path(hook.incidents[0].fields["bundle"]).parent == tmp_path / f"hookd-{os.getuid()}" / "bundles"

    def test_without_capture_nothing_is_written(self, hook, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        hook.start("nan", every=1)
        CALLS["linear"]()[1]()
        hook.stop()
        assert hook.incident.kind == "inf"
        assert list(tmp_path.iterdir()) == []


class TestWhatIsBad:
    def test_a_bad_input_is_the_finding(self, hook, tmp_path):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        bundle = captured(hook, tmp_path, lambda: model(torch.full((2, 4), float("nan"))))
        found = replayed(bundle)
        assert (found["where"], found["module"], found["is_reproduced"]) == ("input", "(root)", True)
        assert found["inputs"][0]["nan_count"] == 8
        assert found["first"] is None

    def test_a_bad_parameter_is_the_finding(self, hook, tmp_path):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[1].weight.data[0, 0] = float("nan")
        found = replayed(captured(hook, tmp_path, lambda: model(torch.ones(2, 4))))
        assert (found["where"], found["module"], found["is_reproduced"]) == ("param", "1", True)
        assert [(one["name"], one["nan_count"]) for one in found["parameters"]] == [("weight", 1)]

    def test_where_the_gate_alone_has_seen_it_the_model_is_carried_and_the_replay_names_the_module(
        self, hook, tmp_path
    ):
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.start("capture", every=1000, directory=str(tmp_path))
        for step in range(4):
            if step == 2:
                model[2][1].weight.data.fill_(HUGE)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
        hook.stop()
        (bundle,) = tmp_path.iterdir()
        assert reported(hook, "bundle")[0].module == "(root)"
        found = replayed(bundle)
        assert (found["is_reproduced"], found["is_bit_equal"]) == (True, True)
        assert (found["first"]["module"], found["first"]["operation"]) == ("2.1", "aten.addmm.default")

    def test_autocast_and_no_grad_are_as_they_were(self, hook, tmp_path):
        model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
        spoil(model)

        def call():
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                model(some(2, 4))

        bundle = captured(hook, tmp_path, call)
        assert text_of(bundle)["call"]["state"]["autocast"] == {"cpu": {"dtype": "bfloat16", "cache": True}}
        assert text_of(bundle)["call"]["state"]["grad"] is False
        found = replayed(bundle)
        assert (found["is_bit_equal"], found["outputs"][0]["dtype"]) == (True, "bfloat16")

    def test_inputs_that_were_changed_in_place_are_said_to_be(self, hook, tmp_path):
        class Doubles(nn.Module):
            def forward(self, x):
                return x.mul_(1e30)

        bundle = captured(hook, tmp_path, lambda: Doubles()(torch.full((2,), 1e20)))
        assert text_of(bundle)["call"]["inputs_changed"] is True
        assert "changed in place" in " ".join(text_of(bundle)["notes"])

    def test_hooks_of_others_are_not_carried_and_said_to_be_there(self, hook, tmp_path):
        model = nn.Linear(4, 4)
        model.register_forward_hook(lambda _module, _inputs, output: output * float("nan"))
        found = replayed(captured(hook, tmp_path, lambda: model(torch.ones(1, 4))))
        assert (found["is_reproduced"], found["is_bit_equal"]) == (False, False)
        assert "hook of others" in found["notes"][0]
        assert "test_capture.py" in found["notes"][0]

    def test_what_is_no_plain_tensor_or_value_is_not_carried(self, hook, tmp_path):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.thing, self.many = object(), list(range(10_000))

            def forward(self, x, other):
                return x * float("nan"), other

        bundle = captured(hook, tmp_path, lambda: Odd()(torch.ones(2), torch.eye(2).to_sparse()))
        notes = " ".join(text_of(bundle)["notes"])
        for part in ("inputs.1", "sparse", "module.thing", "module.many", "list of 10000 items"):
            assert part in notes


class Halved(nn.Module):
    """Divides by zero between two of its modules, and passes the input of a third one on."""

    def __init__(self, *, is_removed=False):
        super().__init__()
        self.first, self.second, self.is_removed = nn.Linear(4, 4), nn.Linear(4, 4), is_removed

    def forward(self, x):
        out = self.second(self.first(x) / 0)
        return torch.zeros_like(out) if self.is_removed else out


class TestWhichCall:
    """The module whose call is saved, if a module was given bad inputs."""

    def test_call_of_the_module_whose_own_code_made_it(self, hook, tmp_path):
        bundle = captured(hook, tmp_path, lambda: nn.Sequential(nn.Identity(), Halved())(torch.ones(2, 4)))
        assert (hook.incident.module, hook.incident.fields["where"]) == ("1", "output")
        assert replayed(bundle, allow=[__name__])["first"]["module"] == "(itself)"

    def test_call_that_was_given_it_where_the_outer_one_has_removed_it(self, hook, tmp_path):
        captured(hook, tmp_path, lambda: Halved(is_removed=True)(torch.ones(2, 4)))
        assert (hook.incident.module, hook.incident.fields["where"]) == ("second", "input")

    @pytest.mark.parametrize(("neginf", "module"), [("false", "1"), ("true", "0")])
    def test_minus_infinity_is_a_mask_unless_it_is_asked_for(self, hook, tmp_path, neginf, module):
        class Masks(nn.Module):
            def forward(self, x):
                return x.masked_fill(x > 0, float("-inf"))

        class Undoes(nn.Module):
            def forward(self, x):
                return -x

        call = nn.Sequential(Masks(), Undoes())
        bundle = captured(hook, tmp_path, lambda: call(torch.ones(2, 4)), neginf=neginf)
        assert hook.incident.module == module
        assert text_of(bundle)["call"]["masks"] is (neginf == "false")

    def test_after_the_whole_model_the_module_is_saved_and_nothing_else(self, hook, tmp_path):
        model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.start("capture", every=1000, directory=str(tmp_path))
        for step in range(5):
            with torch.no_grad():
                if step == 2:
                    spoil(model)
                model(some(2, 4))
            optimizer.step()
        hook.stop()
        assert [one.module for one in hook.incidents] == ["(root)", "1"]
        assert len(list(tmp_path.iterdir())) == 2

    def test_another_option_does_not_give_another_bundle(self, hook, tmp_path):
        _, call = CALLS["linear"]()
        hook.start("capture", directory=str(tmp_path))
        call()
        hook.configure("capture", neginf="true")
        call()
        assert not hook.listens("capture", "root_forward")
        hook.stop()
        assert len(list(tmp_path.iterdir())) == 1

    def test_beside_nan_each_says_its_own(self, hook, tmp_path):
        hook.start("capture", "nan", directory=str(tmp_path))
        CALLS["linear"]()[1]()
        hook.stop()
        assert sorted((one.kind, one.plugin) for one in hook.incidents) == [("bundle", "capture"), ("inf", "nan")]

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
    def test_nested_tensor_without_one_size_is_saved_without_it(self, hook, tmp_path):
        class Ragged(nn.Module):
            def forward(self, x):
                return torch.nested.nested_tensor([x[0].detach() * float("nan"), x[1, :3].detach()])

        model = nn.Sequential(nn.Identity(), Ragged())
        bundle = captured(hook, tmp_path, lambda: model(torch.randn(5, 4)))
        assert (hook.incident.module, hook.incident.fields["value"]) == ("1", "nan")
        assert "nested" in " ".join(text_of(bundle)["notes"])

    def test_of_values_on_a_device_the_reason_is_reported_later(self, hook, tmp_path, monkeypatch):
        monkeypatch.setattr("hookd_capture.on_host", lambda _tensor: False)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.start("capture", directory=str(tmp_path))
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 4), float("inf") if step == 1 else 1.0)).detach()
            optimizer.step()
        hook.stop()
        (incident,) = hook.incidents
        assert (incident.kind, incident.step, incident.fields["where"]) == ("bundle_failed", 2, "output")
        assert "the values were on a device" in incident.message
        assert list(tmp_path.iterdir()) == []


class TestClasses:
    def test_a_users_class_is_imported_only_where_that_is_allowed(self, hook, tmp_path):
        bundle = captured(hook, tmp_path, CALLS["dropout"]()[1])
        with pytest.raises(Exception, match="not torch's") as refused:
            replayed(bundle)
        assert "--allow-import" in refused.value.hint
        assert refused.value.exit_code == 2

    def test_a_script_is_read_for_what_it_defines_and_its_training_not_run(self, hook, tmp_path):
        script = tmp_path / "train.py"
        script.write_text(
            "import torch\nfrom torch import nn\nSCALE = 3e38\n"
            "class Net(nn.Module):\n    def forward(self, x):\n        return twice(x) * SCALE\n"
            "def twice(x):\n    return x + x\n"
            "raise SystemExit('trained')\n"
        )
        names = {"__name__": "__main__"}
        with contextlib.suppress(SystemExit):
            exec(compile(script.read_text(), str(script), "exec"), names)
        bundle = captured(hook, tmp_path / "bundles", lambda: names["Net"]()(torch.ones(2)))
        with pytest.raises(Exception, match="training script") as refused:
            replayed(bundle)
        assert "--source" in refused.value.hint
        found = replayed(bundle, source=str(script))
        assert (found["is_reproduced"], found["is_bit_equal"]) == (True, True)
        assert found["first"]["stack"][-1] == f"{script}:6 forward"

    def test_name_that_a_script_makes_where_it_trains_is_asked_for(self, hook, tmp_path):
        script = tmp_path / "train.py"
        script.write_text(
            "import torch\nfrom torch import nn\n"
            "class Net(nn.Module):\n    def forward(self, x):\n        return x * scale\n"
            "if __name__ == '__main__':\n    scale = float('inf')\n"
        )
        names = {"__name__": "__main__"}
        exec(compile(script.read_text(), str(script), "exec"), names)
        bundle = captured(hook, tmp_path / "bundles", lambda: names["Net"]()(torch.ones(2)))
        raised = replayed(bundle, source=str(script))["raised"]
        assert "name 'scale' is not defined" in raised
        assert "assignments without a call are run" in raised
        besides = tmp_path / "besides.py"
        besides.write_text(script.read_text().partition("if __name__")[0] + "scale = float('inf')\n")
        assert "is not defined" in replayed(bundle, source=str(besides))["raised"], "a call is none"
        besides.write_text(script.read_text().partition("if __name__")[0] + "scale = 1e999\n")
        assert replayed(bundle, source=str(besides))["is_reproduced"]


def test_the_training_is_bit_for_bit_the_same_with_capture(hook, tmp_path):
    def train():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return {name: bits(one) for name, one in model.state_dict().items()}, bits(torch.get_rng_state())

    plain = train()
    hook.start("capture", directory=str(tmp_path))
    observed = train()
    hook.stop()
    assert observed == plain
    assert list(tmp_path.iterdir()) == []


def test_what_is_taken_for_calm_draws_no_random_numbers():
    from torch.testing._internal.common_modules import module_db  # takes seconds, and loads torch's compiler

    seen = set()
    for info in module_db:
        if info.module_cls in CALM:
            for one in info.module_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=True):
                module = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs)
                before = torch.get_rng_state()
                module(*one.forward_input.args, **one.forward_input.kwargs)
                assert torch.equal(torch.get_rng_state(), before), info.module_cls
            seen.add(info.module_cls)
    assert len(seen) > len(CALM) / 2
