"""Which ranks leave their modules to another rank of their run, on real pages of this very process."""

from __future__ import annotations

import pytest

from hookd.tool.daemon.metrics.collector import AttachCounter, FleetCollector
from hookd.tool.daemon.metrics.replicas import Replicas
from hookd.tool.daemon.metrics.selection import Limits
from tests.support.pages import Ranks

NAMES = ("(root)", "blocks.0", "blocks.1")


class Fleet:
    def __init__(self, targets):
        self.listed = targets

    def targets(self):
        return self.listed


@pytest.fixture
def make(stack):
    """Return ranks with the given modules each."""

    def ranks(*modules):
        made = Ranks(stack, len(modules))
        for page, names in zip(made.pages, modules, strict=True):
            for name in names:
                page.module(name, "Block", 1)
        return made

    return ranks


def of(replicas, ranks):
    for target in ranks.targets:
        target.read()
    return sorted(target.claim.rank for target in replicas.among(ranks.targets))


def test_one_rank_serves_the_modules_that_all_have(make):
    assert of(Replicas(), make(NAMES, NAMES, NAMES)) == ["1", "2"]
    assert of(Replicas(), make(NAMES)) == []


def test_ranks_with_other_modules_serve_theirs(make):
    other = ("(root)", "blocks.2", "blocks.3")
    assert of(Replicas(), make(NAMES, NAMES, other, other)) == ["1", "3"]


def test_a_rank_whose_modules_are_not_yet_all_known_is_no_other(make):
    assert of(Replicas(), make(NAMES, NAMES[:2], ())) == ["1", "2"]
    assert of(Replicas(), make(NAMES[:2], NAMES)) == ["1"]
    assert of(Replicas(), make((), NAMES, NAMES)) == ["0", "2"], "rank 0 may have none"


def test_when_the_rank_that_serves_them_has_ended_another_one_does_and_those_that_have_ended_remain_what_they_were(
    make,
):
    replicas, ranks = Replicas(), make(NAMES, NAMES, NAMES)
    assert of(replicas, ranks) == ["1", "2"]
    ranks.targets[0].detach()
    ranks.targets[2].detach()
    assert of(replicas, ranks) == ["2"]


@pytest.mark.parametrize(("groups", "expected"), [(("0-1", "0-1"), ["1"]), (("0", "1"), []), ((), [])])
def test_ranks_that_average_nothing_are_no_replicas_though_their_modules_have_the_same_names(make, groups, expected):
    ranks = make(NAMES, NAMES)
    for rank in (0, 1):
        ranks.add(rank, "hookd_steps", 5)
        for group in groups[rank : rank + 1]:
            ranks.add(rank, "hookd_collectives", 3, group=group)
    assert of(Replicas(), ranks) == expected


def test_a_rank_with_a_plugin_that_the_first_has_not_serves_its_modules(make):
    ranks = make(NAMES, NAMES)
    ranks.pages[0].update_identity(plugins={"nan": {}})
    ranks.pages[1].update_identity(plugins={"nan": {}, "memory": {}})
    assert of(Replicas(), ranks) == []


def test_a_node_that_has_rank_0_serves_its_lowest_rank_though_rank_0_is_not_watched(make):
    ranks = make(NAMES, NAMES, NAMES)
    for rank in (1, 2):
        ranks.pages[rank].update_identity(local_rank=rank)
        ranks.targets[rank].read()
        ranks.targets[rank].reidentify()
    ranks.targets[:1] = []
    assert of(Replicas(is_fleet=True), ranks) == ["2"]


def test_jobs_of_one_rank_each_are_no_replicas_of_each_other(make, stack):
    ranks = make(NAMES)
    other = Ranks(stack, 1, run="other.py")
    other.pages[0].module("(root)", "Block", 1)
    ranks.targets += other.targets
    assert of(Replicas(is_fleet=True), ranks) == []


@pytest.fixture
def far(make):
    """Return the ranks 2 and 3 of a job of 4."""
    ranks = make(NAMES, NAMES, NAMES, NAMES)
    for rank in (2, 3):
        ranks.pages[rank].update_identity(world_size=4)
        ranks.targets[rank].read()
        ranks.targets[rank].reidentify()
    ranks.targets[:2] = []
    return ranks


@pytest.mark.parametrize(
    ("groups", "expected"), [({"0-3": 9.0}, ["2", "3"]), ({"0-3": 9.0, "2-3": 0.0}, ["2", "3"]), ({"0-3": 9.0, "2-3": 7.0}, ["3"]), ({}, [])]
)  # fmt: skip
def test_of_a_job_on_several_nodes_rank_0_alone_serves_them_unless_it_may_have_others(far, groups, expected):
    for rank in (2, 3):
        far.add(rank, "hookd_steps", 5)
        for group, issued in groups.items():
            far.add(rank, "hookd_collectives", issued, group=group)
    assert of(Replicas(is_fleet=True), far) == expected
    assert of(Replicas(is_fleet=False), far) == (["3"] if groups else []), "the daemon of rank 0 may not be there"


def test_before_its_first_collectives_a_rank_serves_nothing_that_it_would_not_serve_later(far):
    assert of(Replicas(is_fleet=True), far) == ["2", "3"]


def test_a_replica_serves_all_but_its_modules_and_those_with_a_finding(make):
    ranks = make(NAMES, NAMES)
    for rank in (0, 1):
        ranks.add(rank, "hookd_steps", 5)
        for name in NAMES:
            ranks.set(rank, "hookd_activations_mean", 1.0, module=name)
            ranks.set(
                rank,
                "hookd_nan_origin",
                float((rank, name) == (1, "blocks.1")),
                module=name,
                where="output",
                kind="nan",
            )

    def served(**limits):
        samples = [
            sample
            for family in FleetCollector(Fleet(ranks.targets), AttachCounter(), Limits(**limits)).collect()
            for sample in family.samples
            if sample.labels.get("rank") == "1"
        ]
        assert any(sample.name == "hookd_steps_total" for sample in samples)
        assert not any(sample.value for sample in samples if sample.name == "hookd_series_dropped_total")
        return {sample.labels["module"] for sample in samples if "module" in sample.labels}

    assert served() == {"blocks.1"}
    assert served(replicas=True) == served(detail="all") == set(NAMES)
