"""Device seconds of modules, compared with events recorded by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tests.gpu.place import Table

if TYPE_CHECKING:
    from tests.gpu.place import Place

STEPS, EVERY = 400, 10
BAR = 1.3
"""The ratio that layers which take the device longer than their launch may reach."""


class Busy(nn.Module):
    """Some large products, which it measures itself; the processor goes on at once."""

    def __init__(self, times: int, width: int) -> None:
        super().__init__()
        self.times, self.layer = times, nn.Linear(width, width)
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same shape."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(self.times):
            x = self.layer(x)
        end.record()
        self.events.append((begin, end))
        return x


def part(place: Place) -> Table:
    """Compare `timing` with events by hand."""
    table = Table(
        "Device seconds",
        f"`timing:every={EVERY}` over {STEPS} steps, and events of the modules' own in the {STEPS // 10} steps before.",
        ("module", "by hand", "hookd", "ratio"),
    )
    if place.is_dry:
        table.text += " Not measured: there is no GPU."
        return table
    from hookd.testing import FakeTarget

    model = nn.Sequential(Busy(2, 2048), Busy(20, 2048), Busy(60, 2048)).cuda()
    _train(model, STEPS // 20)
    for busy in model:
        busy.events.clear()
    _train(model, STEPS // 10)
    torch.cuda.synchronize()
    by_hand = [sum(begin.elapsed_time(end) for begin, end in busy.events) / len(busy.events) / 1e3 for busy in model]
    with FakeTarget(record=False) as hook:
        hook.begin(("timing",), {"every": EVERY}, budget=1.0)
        _train(model, STEPS)
        torch.cuda.synchronize()
        _train(model, 1)  # at its end all steps before it are read
        calls = hook.metric("timing_forward_calls")
        found = {
            name[0]: seconds / calls[name] for name, seconds in hook.metric("timing_forward_device_seconds").items()
        }
    for at, expected in enumerate(by_hand):
        ratio = found[str(at)] / expected
        table.rows.append(
            [
                f"{model[at].times} products",
                f"{expected * 1e3:.2f} ms",
                f"{found[str(at)] * 1e3:.2f} ms",
                f"{ratio:.2f}",
            ]
        )
        table.figures[str(at)] = {"by_hand_s": expected, "hookd_s": found[str(at)]}
        if at and not 1 / BAR < ratio < BAR:
            table.failures.append(f"device seconds of {model[at].times} products are {ratio:.2f} times those by hand")
    return table


def _train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2048, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
