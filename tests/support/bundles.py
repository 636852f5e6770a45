"""Bundles of `capture`: calls that are spoiled, captured and repeated."""

from __future__ import annotations

import json

import torch
from hookd_capture.bundle.replay import result

HUGE = 3e38


def spoil(module):
    """Make a module overflow although its parameters are finite."""
    with torch.no_grad():
        for one in module.parameters():
            one.fill_(HUGE)


def some(*shape, dtype=None):
    """Return numbers from 2 to 3."""
    return torch.rand(shape, dtype=dtype) + 2


def captured(hook, directory, call, **options):
    """Make a call under `capture`; return the one bundle that exists then."""
    hook.start("capture", directory=str(directory), **options)
    call()
    hook.stop()
    (bundle,) = directory.iterdir()
    return bundle


def replayed(bundle, *, allow=(), source=None, device=None):
    return result({"bundle": str(bundle), "allow": list(allow), "source": source, "device": device})


def reported(hook, kind):
    return [one for one in hook.incidents if one.kind == kind]


def text_of(bundle):
    return json.loads((bundle / "bundle.json").read_text())


def bits(tensor):
    whole = tensor.contiguous().reshape(-1)
    return bytes(whole.view(torch.uint8).tolist()) if whole.numel() else b""
