"""hookd in this process, and what its plugins said: `hookd.testing`, as authors of plugins use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from hookd.testing import FakeTarget

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def hook() -> Iterator[FakeTarget]:
    """hookd, not started yet; after the test no plugin may have raised anything."""
    torch.manual_seed(0)
    with FakeTarget(record=False) as target:
        yield target
        target.stop_clean()


@pytest.fixture
def group(hook: FakeTarget) -> Iterator[dist.ProcessGroup]:
    """A process group of this rank alone, which says that it is one of two."""
    hook.pretend(ranks=(0, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
