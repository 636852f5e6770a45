"""Trainings that nobody has thought of: random models, parameters of many types, optimizers over random parts of them.

Each is trained plainly and observed: it ends bit-identical, and calls, steps, samples and norms are those that it has counted
itself. The seed of one that fails is in its name.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.agent import running

STEPS = 4
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.complex64)


class Counted(nn.Module):
    """Counts its own calls, which nothing of torch's does."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        object.__setattr__(self, "calls", self.calls + 1)
        return self.act(x)


class Leaf(Counted):
    def __init__(self, dtype: torch.dtype, *, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(4, 4) / 4).to(dtype), requires_grad=not frozen)
        self.bias = nn.Parameter((torch.randn(4) / 4).to(dtype))

    def act(self, x: torch.Tensor) -> torch.Tensor:
        made = x.to(self.weight.dtype) @ self.weight + self.bias
        return torch.tanh(made.real if made.is_complex() else made).to(torch.float32)


class Chain(Counted):
    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        for one in vars(self.inside)["_modules"].values():
            x = x + one(x)
        return x


class Twice(Counted):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) - self.inside(2 * x)


class Again(Counted):
    """Calls itself."""

    def __init__(self, inside: nn.Module, levels: int) -> None:
        super().__init__()
        self.inside, self.levels, self.level = inside, levels, 0

    def act(self, x: torch.Tensor) -> torch.Tensor:
        if self.level == self.levels:
            return self.inside(x)
        self.level += 1
        try:
            return self(x) * 0.5
        finally:
            self.level -= 1


class Hostile(Counted):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.parameters, self.children, self.modules, self.buffers = {"lr": 1}, 2, None, [1]
        self.named_parameters, self.named_modules, self.state_dict, self.name, self.training = 1, 3, 0, 3, "x"

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)

    def __len__(self) -> int:
        raise RuntimeError("len")

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    __hash__ = None


def tree(rng: random.Random, depth: int) -> nn.Module:
    kind = rng.choice(["chain", "chain", "twice", "again", "hostile"]) if depth else "leaf"
    if kind == "leaf":
        return Leaf(rng.choice(DTYPES), frozen=rng.random() < 0.2)
    inside = [tree(rng, rng.randrange(depth)) for _ in range(rng.randint(1, 3) if kind == "chain" else 1)]
    if kind == "chain":
        return Chain(*inside, *(inside[:1] if rng.random() < 0.3 else []))
    if kind == "again":
        return Again(*inside, levels=rng.randint(1, 4))
    return (Twice if kind == "twice" else Hostile)(*inside)


def below(path: str, module: nn.Module, found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return all modules by their first paths, past what their classes make of torch's methods."""
    if not any(one is module for one in found.values()):
        found[path or "(root)"] = module
        for name, child in vars(module)["_modules"].items():
            below(f"{path}.{name}" if path else name, child, found)
    return found


def own(module: nn.Module) -> list[nn.Parameter]:
    return list(vars(module)["_parameters"].values())


class Training:
    """One that a seed has chosen; the same as often as it is made."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.model = tree(rng, rng.randint(1, 3))
        self.modules = below("", self.model, {})
        self.parameters = [p for module in self.modules.values() for p in own(module)]
        trained = [p for p in self.parameters if p.requires_grad]
        rng.shuffle(trained)
        self.mode = rng.choice(["together", "together", "turns", "each", "by hand"])
        self.accumulated = rng.choice([1, 1, 2]) if self.mode != "each" else 1
        self.stepped = trained if self.mode in ("each", "by hand") else trained[: max(1, round(len(trained) * 0.8))]
        many = len(trained) if self.mode == "each" else rng.randint(1, 3)
        parts = [part for part in (self.stepped[at::many] for at in range(many)) if part]
        kinds = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam]
        self.optimizers = [] if self.mode == "by hand" else [rng.choice(kinds)(part, lr=1e-3) for part in parts]
        if self.mode == "each":
            for optimizer in self.optimizers:
                (parameter,) = optimizer.param_groups[0]["params"]
                parameter.register_post_accumulate_grad_hook(lambda _, one=optimizer: one.step())
        self.reported: list[str] = []
        self.norms: dict[str, tuple[float, float]] = {}

    def train(self) -> None:
        for _ in range(STEPS):
            for optimizer in self.optimizers if self.mode == "turns" else [None]:
                for parameter in self.parameters:
                    parameter.grad = None
                weights = self.measured(lambda p: p)
                for _ in range(self.accumulated):
                    loss = self.model(torch.randn(3, 4)).square().mean()
                    loss.backward()
                self.reported.append(loss.item().hex())
                grads = self.measured(lambda p: p.grad if p.requires_grad else None)
                self.norms = {name: (grads[name], weights[name]) for name in self.modules}
                for one in [optimizer] if optimizer else self.optimizers if self.mode == "together" else []:
                    one.step()
                if self.mode == "by hand":
                    with torch.no_grad():
                        for p in self.stepped:
                            if p.grad is not None:
                                p.sub_(p.grad, alpha=1e-3)

    def measured(self, of: Any) -> dict[str, float]:
        """Return the norm of some tensors of each module, in float64."""
        return {name: norm([of(p) for p in own(module)]) for name, module in self.modules.items()}

    def result(self) -> tuple[list[str], list[bytes]]:
        wide = [p.detach().to(torch.complex128) for p in self.parameters]
        return self.reported, [torch.view_as_real(one).numpy().tobytes() for one in wide]


def norm(tensors: list[torch.Tensor | None]) -> float:
    there = [one.detach().reshape(-1).to(torch.complex128) for one in tensors if one is not None]
    return torch.linalg.vector_norm(torch.cat(there)).item() if there else 0.0


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 2_000), marks=[pytest.mark.load, pytest.mark.timeout(3600)])], ids=str
)
def test_a_random_training_is_as_without_hookd_and_its_numbers_are_its_own(seeds) -> None:
    for seed in seeds:
        plain = Training(seed)
        plain.train()
        observed = Training(seed)
        with running("timing", "activations", options={"every": "1"}, budget=100.0) as agent:
            observed.train()
            agent.parts.steps.finish()
            reported = f"seed {seed}, {observed.mode}: {[type(one).__name__ for one in observed.modules.values()]}"
            check(agent, observed, reported)
        assert observed.result() == plain.result(), reported


def check(agent: Any, training: Training, reported: str) -> None:
    assert {name: count for (name,), count in agent.values("hookd_plugin_errors").items() if count} == {}, reported
    assert agent.values("hookd_steps")[()] == STEPS, reported
    calls = {name: module.calls for name, module in training.modules.items() if isinstance(module, Counted)}
    assert {name: count for (name,), count in agent.values("hookd_timing_forward_calls").items()} == calls, reported
    if training.mode not in ("together", "each"):
        return  # there is no optimizer's step, or not one for all
    grads, weights = (agent.values(f"hookd_activations_{of}_norm") for of in ("grad", "weight"))
    for name, module in training.modules.items():
        if any(p is one for p in own(module) for one in training.stepped):
            assert (grads[name,], weights[name,]) == pytest.approx(training.norms[name], rel=1e-2, abs=1e-6), (
                name,
                reported,
            )
