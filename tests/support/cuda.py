"""Shared by tests on a GPU."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Make CUDA raise where the host would wait for the device."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode")  # torch's own: a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
