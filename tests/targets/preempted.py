"""A training loop that counts the signals that reach it: `--kind custom`, `exit` or `interrupt`.

A handler raises into whatever code runs. The loop prints `caught N` when that exception arrived in it, `lost N` when
the handler ran and a whole step later nothing had arrived, `ready` when it trains. It ends with `done` on SIGUSR1.
"""

import os
import signal

import torch
from _steps import checksum, parse
from torch import nn


class PreemptedError(Exception):
    """An exception as a cluster's SIGTERM handler may raise it."""


class Leaving(SystemExit):
    """Another one."""


arguments = parse(kind="custom")
number, kind = {
    "custom": (signal.SIGTERM, PreemptedError),
    "exit": (signal.SIGTERM, Leaving),
    "interrupt": (signal.SIGINT, KeyboardInterrupt),
}[arguments.kind]
raised = caught = reported = unexpected = 0
is_over = has_begun = False


def on_signal(*_):
    global raised
    raised += 1
    raise kind(raised)


def on_end(*_):
    global is_over
    is_over = True


def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def report():
    """Acknowledge a signal, once, inside the `try` in which the next one is to arrive."""
    global reported, has_begun
    if not has_begun:
        has_begun = True
        tell("ready")
    if raised > reported:
        reported = raised
        tell("caught" if caught == raised else "lost", reported)


model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(6)), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
x = torch.randn(4, 8)


def train():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    assert loss.requires_grad
    loss.backward()
    optimizer.step()


def train_until_the_end():
    """Contain the loop, so that no instruction between two steps is outside of the `try`."""
    while not is_over:
        report()
        train()


def came_while_torch_put_back(error):
    """Return whether it cut short the `finally` in which an optimizer's step restores the gradient mode: torch's own flaw."""
    trace = error.__traceback__
    while trace.tb_next is not None and trace.tb_frame.f_code.co_name != "_use_grad":  # torch/optim/optimizer.py, 2.13
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_name == "_use_grad"


for _ in range(5):
    train()  # torch's own first-time imports swallow what a handler raises
signal.signal(number, on_signal)
signal.signal(signal.SIGUSR1, on_end)
while not is_over:
    try:
        train_until_the_end()
    except kind as error:  # noqa: PERF203
        caught += 1
        if came_while_torch_put_back(error):
            torch.set_grad_enabled(True)
    except Exception as error:  # noqa: BLE001
        unexpected += 1
        os.write(2, f"unexpected {error!r}\n".encode())
tell("done", checksum(model), "raised", raised, "caught", caught, "unexpected", unexpected)
