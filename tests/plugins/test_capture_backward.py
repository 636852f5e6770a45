"""The bundle of a bad gradient: the model, and what reached it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from tests.support.bundles import replayed, reported, text_of


def halves():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(Root(), nn.Linear(4, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Root(nn.Module):
    """Its backward divides by zero where its output is 0."""

    def __init__(self):
        super().__init__()
        self.is_safe = False

    def forward(self, x):
        return x if self.is_safe else (x - x.detach()).abs().sqrt()


class TestBackward:
    def train(self, hook, directory, at=1, **options):
        model, optimizer = halves()
        hook.start("capture", directory=str(directory), **options)
        for step in range(1, at + 2):
            model[2][0].is_safe = step < at
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        hook.stop()

    def test_the_model_and_the_gradient_that_reached_it_are_carried(self, hook, tmp_path):
        self.train(hook, tmp_path, every=1)
        (bundle,) = tmp_path.iterdir()
        assert reported(hook, "bundle")[0].module == "(root)"
        found = replayed(bundle, allow=[__name__])
        assert (found["where"], found["raised"], found["is_reproduced"]) == ("grad", None, True)
        assert (found["first"]["module"], found["first"]["is_backward"]) == ("2.0", True)
        assert {one["name"] for one in found["gradients"]} == {"0.weight", "0.bias"}
        assert not any(one["is_bad"] for one in found["outputs"])

    def test_it_is_carried_from_a_step_in_which_no_module_is_checked(self, hook, tmp_path):
        self.train(hook, tmp_path, at=2, every=1000)
        (incident,) = hook.incidents
        assert (incident.kind, incident.fields["where"], incident.step) == ("bundle", "grad", 2)
        assert replayed(incident.fields["bundle"], allow=[__name__])["is_reproduced"]

    def test_after_a_model_the_call_of_a_criterion_is_not_taken_for_it(self, hook, tmp_path):
        model, optimizer = halves()
        hook.start("capture", directory=str(tmp_path))
        nn.MSELoss()(model(torch.ones(2, 4)), torch.ones(2, 1)).backward()
        optimizer.step()
        hook.stop()
        assert (hook.incident.module, hook.incident.fields["where"]) == ("(root)", "grad")

    def test_gradient_of_a_closure_is_carried(self, hook, tmp_path):
        model, _ = halves()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            return loss

        hook.start("capture", directory=str(tmp_path))
        optimizer.step(closure)
        hook.stop()
        assert (hook.incident.kind, hook.incident.fields["where"]) == ("bundle", "grad")

    def test_where_no_gradient_reached_the_model_the_reason_is_reported(self, hook, tmp_path):
        model, optimizer = halves()
        hook.start("capture", directory=str(tmp_path))
        model(torch.ones(2, 4))
        model[0].weight.grad = torch.full((4, 4), float("inf"))
        optimizer.step()
        hook.stop()
        assert "no gradient reached the model" in reported(hook, "bundle_failed")[0].message
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("fused", [False, True])
    def test_step_that_a_grad_scaler_skips_is_no_case(self, hook, tmp_path, fused):
        model, _ = halves()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        hook.start("capture", directory=str(tmp_path))
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        hook.stop()
        assert hook.incidents == []

    def test_of_several_calls_in_a_step_it_is_said_which(self, hook, tmp_path):
        model, optimizer = halves()
        hook.start("capture", directory=str(tmp_path))
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        hook.stop()
        (bundle,) = tmp_path.iterdir()
        assert "of the 2 calls" in " ".join(text_of(bundle)["notes"])

    def test_what_is_kept_is_let_go_at_the_end_of_the_step(self, hook, tmp_path):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.start("capture", directory=str(tmp_path))
        batch = torch.ones(2, 4)
        model(batch).sum().backward()
        alive = weakref.ref(batch)
        del batch
        assert alive() is not None
        optimizer.step()
        assert alive() is None
        with torch.no_grad():
            batch = torch.ones(2, 4)
            model(batch)
        alive = weakref.ref(batch)
        del batch
        assert alive() is None

    def test_a_loss_has_none_and_the_reason_is_reported(self, hook, tmp_path):
        model, optimizer = halves()
        hook.start("capture", directory=str(tmp_path))
        (model(torch.ones(2, 4)).sum() * float("nan")).backward()
        optimizer.step()
        hook.stop()
        assert hook.incident.kind == "bundle_failed"
        assert "the loss is computed" in hook.incident.message
        assert list(tmp_path.iterdir()) == []
