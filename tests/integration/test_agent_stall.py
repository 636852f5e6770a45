"""Facts that the agent's own thread publishes for those who look at a hang from outside."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from hookd.target.events.liveness import Liveness
from hookd.wire.page import PageReader, PageWriter


@pytest.fixture
def page():
    made = PageWriter.create({"pid": os.getpid()})
    yield made
    made.close()


def values(page):
    reader = PageReader(os.dup(page.fd))
    try:
        return {(family.name, *one.values): one.cells[0] for family in reader.read().families for one in family.series}
    finally:
        reader.close()


def test_the_collectives_of_each_group_are_counted_and_groups_are_named_by_their_ranks(page, tmp_path):
    stall = Liveness(page)
    stall.tick()
    assert values(page) == {("hookd_agent_ticks",): 1.0, ("hookd_compiling",): 0.0}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before, last = dist.new_group([0]), dist.new_group([0])
        stall.tick()
        first = values(page)
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2), group=before)
        for _ in range(2):
            dist.all_reduce(torch.ones(2), group=last)
        stall.tick()
        after = values(page)
        counts = [
            after["hookd_collectives", group] - first["hookd_collectives", group] for group in ("0", "0#2", "0#3")
        ]
        assert counts == [3.0, 1.0, 2.0]
    finally:
        dist.destroy_process_group()
    stall.tick()  # it is gone: there is nothing to ask
    assert values(page)["hookd_agent_ticks",] == 4.0


def test_that_torch_compiles_is_seen_from_another_thread_and_only_while_it_does(page):
    stall, seen = Liveness(page), []

    def look():
        stall.tick()
        seen.append(values(page)["hookd_compiling",])

    def backend(graph, _example):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return graph.forward

    def step(x):
        return torch.relu(x) + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend)
    look()
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    look()
    assert seen == [0.0, 1.0, 0.0]
