"""The results of one scrape, over real pages of this very process."""

from __future__ import annotations

import gzip
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from hookd.tool.attach.container import Container
from hookd.tool.daemon.fleet.identity import Identity
from hookd.tool.daemon.fleet.targets import Target
from hookd.tool.daemon.incidents.kinds import FROM_ZERO, MOST_OF_TARGET
from hookd.tool.daemon.metrics.collector import PAUSE_BUCKETS_S, AttachCounter, FleetCollector
from hookd.tool.daemon.metrics.families import PageFamily, encode
from hookd.tool.daemon.metrics.scrapes import render
from hookd.tool.daemon.metrics.selection import MAX_CORE, Limits
from hookd.tool.daemon.watch.watcher import Declared, Sample
from hookd.tool.daemon.watch.watchers import Guarded
from hookd.wire import labels
from hookd.wire.page import EVENTS, MIN_SIZE, PageWriter
from tests.support import emulated

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Fleet:
    """Targets as the collector asks for them."""

    def __init__(self):
        self.listed = []

    def targets(self):
        return self.listed


@pytest.fixture
def fleet():
    fleet = Fleet()
    yield fleet
    for target in fleet.listed:
        target.close()


@pytest.fixture
def join(fleet):
    """Yield a new page whose target, under its own run, is in the fleet."""
    pages = []

    def make(run="train.py", rank="0", **identity):
        page = PageWriter.create(
            {"pid": os.getpid(), "run": run, "rank": rank, "script": "train.py", "is_named": True, **identity}
        )
        page.set_state("running")
        target = Target(os.getpid(), os.dup(page.fd))
        target.claim = labels.Claim(os.getpid(), os.getpid(), rank, run, run)
        fleet.listed.append(target)
        pages.append(page)
        return page

    yield make
    for page in pages:
        page.close()


@pytest.fixture
def scrape(fleet):
    """Scrape, and check that both formats hold the same samples for strict parsers."""
    collector = FleetCollector(fleet, AttachCounter(), Limits())

    def read():
        assert_as_prometheus_client(collector)
        text, kind = render(collector, "", frozenset(), is_gzip=False)
        assert kind.startswith("text/plain")
        strict, kind = render(collector, OPENMETRICS, frozenset(), is_gzip=False)
        assert kind.startswith("application/openmetrics-text")
        samples = samples_of(parse_text(text.decode()))
        assert set(samples) == set(samples_of(parse_openmetrics(strict.decode())))
        return samples

    return read


def assert_as_prometheus_client(collector):
    """Check that our text equals the output of prometheus_client's own encoders byte for byte, in each available format."""
    families = collector.families()
    for accept in ("", OPENMETRICS, "application/openmetrics-text; version=2.0.0", "text/plain; version=1.0.0"):
        encoder, _ = choose_encoder(accept)
        metrics = [family.metric() if isinstance(family, PageFamily) else family for family in families]
        assert encode(families, encoder) == encoder(Given(metrics)), accept


class Given:
    """A registry of these families."""

    def __init__(self, metrics):
        self.metrics = metrics

    def collect(self):
        return iter(self.metrics)


def samples_of(families):
    """Return the values by name and sorted labels; a duplicate series is an error."""
    found = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def key(name, run="train.py", rank="0", **more):
    return (name, *sorted({"run": run, "rank": rank, **more}.items()))


def put(page, name, kind, cells, labels_=None, *, buckets=(), text="Help."):
    labels_ = labels_ or {}
    first = page.series(page.family(name, kind, text, tuple(labels_), buckets), tuple(labels_.values()))
    for n, cell in enumerate(cells if isinstance(cells, list) else [cells]):
        page.cells[first + n] = cell


def test_every_series_of_a_target_has_its_run_and_rank(join, scrape):
    page = join(rank="3")
    put(page, "hookd_steps", "counter", 5)
    put(page, "hookd_x_mean", "gauge", -1.5, {"module": "fc"})
    found = scrape()
    assert found[key("hookd_steps_total", rank="3")] == 5
    assert found[key("hookd_x_mean", rank="3", module="fc")] == -1.5


def test_buckets_are_cumulative_and_the_count_is_derived(join, scrape):
    put(join(), "hookd_step_seconds", "histogram", [3, 2, 1, 9.5], buckets=(0.5, 1.0))
    found = scrape()
    assert [found[key("hookd_step_seconds_bucket", le=le)] for le in ("0.5", "1.0", "+Inf")] == [3, 5, 6]
    assert found[key("hookd_step_seconds_count")] == 6
    assert found[key("hookd_step_seconds_sum")] == 9.5


def test_families_of_one_name_are_merged_over_targets(join, scrape):
    for rank in "01":
        put(join(rank=rank), "hookd_steps", "counter", int(rank))
    found = scrape()
    assert [found[key("hookd_steps_total", rank=rank)] for rank in "01"] == [0, 1]


@pytest.mark.parametrize(
    "name",
    ['we"ird', "back\\slash", "new\nline", "tab\tand\rreturn", "ünïcödé 模块 🧠", "\x00\x1b[31m", "", "\u2028", "{},="],
)
def test_hostile_label_values_come_back_as_they_are(join, scrape, name):
    put(join(run="a" + name.replace("\0", "")), "hookd_x_mean", "gauge", 1, {"module": name})
    value = next(k for k in scrape() if k[0] == "hookd_x_mean")
    assert dict(value[1:])["module"] == name


def test_help_with_newlines_and_backslashes_does_not_break_the_page(join, scrape):
    put(join(), "hookd_x_mean", "gauge", 1, text='a\nhookd_evil 1\n# "\\ EOF')
    assert scrape()[key("hookd_x_mean")] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_counters_that_are_no_counts_are_left_out(join, scrape, value):
    page = join()
    put(page, "hookd_x_calls", "counter", value)
    put(page, "hookd_x_seconds", "histogram", [1, value, 0], buckets=(1.0,))
    put(page, "hookd_y_seconds", "histogram", [1, 2, value], buckets=(1.0,))
    found = scrape()
    assert key("hookd_x_calls_total") not in found
    assert key("hookd_x_seconds_count") not in found
    assert found[key("hookd_y_seconds_bucket", le="+Inf")] == 3
    assert (key("hookd_y_seconds_sum") in found) == (key("hookd_y_seconds_count") in found) == (value > 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-320, -0.0])
def test_gauges_may_be_any_float(join, scrape, value):
    put(join(), "hookd_x_mean", "gauge", value)
    assert repr(scrape()[key("hookd_x_mean")]) == repr(value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("up", "gauge"), ("hookd_target_up", "gauge"), ("hookd_attach", "counter"), ("process_cpu_seconds", "counter"),
     ("hookd_attach_pause_seconds_sum", "gauge"), ("hookd_target", "info"), ("hookd_build_info", "gauge"),
     ("hookd_incidents_total", "gauge")],
)  # fmt: skip
def test_a_page_cannot_use_the_names_of_others(join, scrape, name, kind):
    put(join(), name, kind, 7, {"evil": "yes"})
    found = scrape()
    assert not [k for k in found if ("evil", "yes") in k]
    assert found[key("hookd_series_dropped_total")] == 1


def test_a_plugin_cannot_use_the_name_of_any_family_of_the_daemon(join, fleet):
    join()
    scraped = list(FleetCollector(fleet, AttachCounter(), Limits()).collect())
    own = [(family.name, family.type) for family in scraped if family.name.startswith("hookd_")]
    assert {("hookd_incidents", "counter"), ("hookd_attach", "counter"), ("hookd_target_up", "gauge")} <= set(own)
    free = []

    def more(is_free):
        free.extend(family for family in own if is_free(*family))
        return []

    list(FleetCollector(fleet, AttachCounter(), Limits(), more=more).collect())
    assert not free


def test_a_page_cannot_claim_another_run(join, scrape):
    put(join(), "hookd_x_mean", "gauge", 1, {"run": "other", "rank": "9"})
    assert not [k for k in scrape() if ("run", "other") in k]


def test_targets_that_disagree_on_a_family_do_not_break_the_page(join, scrape):
    put(join(rank="0"), "hookd_x_a", "counter", 1)
    other = join(rank="1")
    put(other, "hookd_x_a", "gauge", 2)
    put(other, "hookd_x_a_total", "gauge", 3)
    put(other, "hookd_x_b", "gauge", 4)
    found = scrape()
    assert found[key("hookd_x_a_total", rank="0")] == 1
    assert found[key("hookd_x_b", rank="1")] == 4
    assert found[key("hookd_series_dropped_total", rank="1")] == 2


def test_a_retired_series_is_gone_at_the_next_scrape(join, scrape):
    page = join()
    put(page, "hookd_x_mean", "gauge", 1, {"module": "a"})
    put(page, "hookd_x_mean", "gauge", 2, {"module": "b"})
    scrape()
    page.retire(page.family("hookd_x_mean", "gauge", "Help.", ("module",)), ("a",))
    found = scrape()
    assert key("hookd_x_mean", module="a") not in found
    assert found[key("hookd_x_mean", module="b")] == 2


def test_a_living_target_is_up_with_its_info_state_and_process(join, scrape):
    join(python="3.12.1", torch="2.13.0", method="attach", world_size=1)
    found = scrape()
    assert found[key("hookd_target_up")] == 1
    assert [
        found[key("hookd_target_state", state=s)] for s in ("attached", "ended", "lost", "corrupt", "detached")
    ] == [
        1,
        0,
        0,
        0,
        0,
    ]
    (info,) = [dict(k[1:]) for k in found if k[0] == "hookd_target_info"]
    assert (info["pid"], info["python"], info["method"], info["reason"]) == (str(os.getpid()), "3.12.1", "attach", "")
    assert found[key("hookd_target_resident_memory_bytes")] > 1e6
    assert found[key("hookd_target_cpu_seconds_total")] > 0
    assert found[key("hookd_target_open_fds")] > 3
    assert found[key("hookd_target_threads")] >= 1


def test_the_info_names_pod_namespace_and_container(fleet, join, scrape):
    join()
    fleet.listed[-1].container = Container("bert-worker-0", "research", "pytorch")
    (info,) = [dict(k[1:]) for k in scrape() if k[0] == "hookd_target_info"]
    names = {name: value for name, value in info.items() if name.startswith("target_")}
    assert names == {"target_pod": "bert-worker-0", "target_namespace": "research", "target_container": "pytorch"}


def test_of_an_ended_target_the_counters_stay_and_the_gauges_go(fleet, join, scrape):
    page = join()
    put(page, "hookd_steps", "counter", 5)
    put(page, "hookd_step_seconds", "histogram", [5, 0, 1.0], buckets=(1.0,))
    put(page, "hookd_x_mean", "gauge", 1)
    scrape()
    put(page, "hookd_steps", "counter", 6)
    fleet.listed[0].lose()
    found = scrape()
    assert found[key("hookd_target_up")] == 0
    assert found[key("hookd_target_state", state="lost")] == 1
    assert found[key("hookd_steps_total")] == 6
    assert found[key("hookd_step_seconds_count")] == 5
    gone = (
        "hookd_x_mean",
        "hookd_heartbeat_timestamp_seconds",
        "hookd_target_threads",
        "hookd_target_resident_memory_bytes",
    )
    assert not [k for k in found if k[0] in gone]
    assert next(dict(k[1:]) for k in found if k[0] == "hookd_target_info")["reason"] == "page closed"


def test_a_corrupt_page_marks_its_target_and_harms_no_other(fleet, join, scrape):
    bad, good = join(rank="0"), join(rank="1")
    put(bad, "hookd_steps", "counter", 1)
    put(good, "hookd_steps", "counter", 2)
    os.pwrite(bad.fd, b"\xff" * 256, 0)
    found = scrape()
    assert found[key("hookd_target_up", rank="0")] == 0
    assert found[key("hookd_target_state", rank="0", state="corrupt")] == 1
    assert key("hookd_steps_total", rank="0") not in found
    assert found[key("hookd_steps_total", rank="1")] == 2


HOSTILE = st.text(st.characters(codec=None), max_size=8)  # lone surrogates among them
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE, inner, max_size=3),
    max_leaves=4,
)
FIELDS = ("run", "rank", "local_rank", "world_size", "script", "python", "torch", "method", "agent_version", "started",
          "attached", "step_offset", "keep")  # fmt: skip


SAID = st.dictionaries(st.sampled_from(FIELDS), JSON | st.sampled_from([10**400, -(10**400), "\udcff.py", "a\nb"]))
MANY = pytest.mark.parametrize(
    "examples", [60, pytest.param(10_000, marks=[pytest.mark.load, pytest.mark.timeout(3600)])]
)


@MANY
def test_whatever_a_process_says_of_itself_is_served_or_left_out(fleet, join, scrape, examples):
    join()
    (target,) = fleet.listed

    @settings(deadline=None, max_examples=examples)
    @given(said=SAID)
    def check(said):
        target.identity = identity = Identity.of_page(said, pid=os.getpid())
        target.claim = labels.Claim(os.getpid(), os.getpid(), identity.rank, identity.run, identity.run)
        samples = scrape()
        assert samples[key("hookd_target_up", identity.run, identity.rank)] == 1
        assert samples[key("hookd_target_errors_total", identity.run, identity.rank)] == 0

    check()


@MANY
def test_a_page_of_any_content_costs_its_target_alone(fleet, join, scrape, examples):
    put(join(rank="0"), "hookd_steps", "counter", 2)
    join(rank="1")
    valid = PageWriter.create({"pid": os.getpid(), "run": "train.py"}, size=MIN_SIZE)
    put(valid, "hookd_steps", "counter", 1)
    put(valid, "hookd_x_seconds", "histogram", [1, 2, 3, 4.5], {"module": "fc"}, buckets=(0.1, 1.0))
    data = os.pread(valid.fd, MIN_SIZE, 0)
    valid.close()
    used = [place for place, byte in enumerate(data) if byte]
    states = set()

    @settings(deadline=None, max_examples=examples)
    @given(changes=st.lists(st.tuples(st.sampled_from(used), st.binary(min_size=1, max_size=4)), max_size=3))
    def check(changes):
        fd = os.memfd_create("hookd-page")
        os.pwrite(fd, data, 0)
        for place, changed in changes:
            os.pwrite(fd, changed, place)
        fleet.listed[1].close()
        fleet.listed[1] = target = Target(os.getpid(), fd)
        target.claim = labels.Claim(os.getpid(), os.getpid(), "1", "train.py", "train.py")
        assert scrape()[key("hookd_steps_total", rank="0")] == 2
        states.add(target.state)

    check()
    assert states == {"attached", "corrupt"}


BOUNDS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4, unique=True).map(sorted)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bounds=BOUNDS, data=st.data(), kind=st.sampled_from(["counter", "gauge", "histogram"]))
def test_whatever_is_in_the_cells_of_a_family_parses(fleet, scrape, bounds, kind, data):
    page = PageWriter.create({"pid": os.getpid(), "run": "r", "rank": "0"})
    fleet.listed = [Target(os.getpid(), os.dup(page.fd))]
    width = len(bounds) + 2 if kind == "histogram" else 1
    cells = data.draw(st.lists(st.floats(), min_size=width, max_size=width))
    try:
        put(
            page,
            "hookd_x",
            kind,
            cells,
            {"module": data.draw(st.text(max_size=4))},
            buckets=tuple(bounds) if width > 1 else (),
        )
        scrape()
    finally:
        fleet.listed.pop().close()
        page.close()


def test_a_histogram_whose_counts_add_up_to_infinity_is_none(fleet, scrape):
    page = PageWriter.create({"pid": os.getpid(), "run": "r", "rank": "0"})
    fleet.listed = [Target(os.getpid(), os.dup(page.fd))]
    try:
        put(page, "hookd_x", "histogram", [9e307, 9e307, 0.0], {}, buckets=(0.0,))
        assert not [name for name in map(str, scrape()) if "hookd_x" in name]
        put(page, "hookd_y", "histogram", [9e307, 8e307, 0.0], {}, buckets=(0.0,))
        assert [name for name in map(str, scrape()) if "hookd_y" in name]
    finally:
        fleet.listed.pop().close()
        page.close()


@emulated.lacks("proc")
def test_a_script_whose_name_is_no_text_is_served(tmp_path):
    """In the form of the kernel, before an attach or if the page has another version."""
    script = os.fsencode(tmp_path) + b"/bad\xff.py"
    Path(os.fsdecode(script)).write_text("import sys; print('ready', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        identity = Identity.of_process(process.pid)
        process.stdin.close()
    assert identity.script.endswith("/bad?.py")
    identity.script.encode()


def test_a_target_whose_samples_cannot_be_made_costs_no_other_one(fleet, join, scrape, caplog, monkeypatch):
    join()
    put(join(run="odd.py"), "hookd_x", "gauge", [1])
    odd = fleet.listed[1]
    monkeypatch.setattr(odd, "usage", lambda: 1 / 0)
    samples = scrape()
    assert samples[key("hookd_target_up")] == 1
    assert samples[key("hookd_target_errors_total")] == 0
    first = samples[key("hookd_target_errors_total", run="odd.py")]
    assert scrape()[key("hookd_target_errors_total", run="odd.py")] > first > 0
    assert [one.message for one in caplog.records if "is not served" in one.message] == [caplog.records[0].message]


@emulated.lacks("proc")
def test_the_daemons_own_process_has_the_names_that_every_exporter_uses(scrape):
    found = scrape()
    assert found[("process_resident_memory_bytes",)] > 1e6
    assert found[("process_cpu_seconds_total",)] > 0
    assert ("process_open_fds",) in found
    assert found[("process_start_time_seconds",)] > 1e9


def test_openmetrics_has_the_unit_that_a_name_ends_with(join, fleet):
    page = join()
    put(page, "hookd_x_mean", "gauge", 1)
    put(page, "hookd_x_wait_seconds", "counter", 1)
    text = render(FleetCollector(fleet, AttachCounter(), Limits()), OPENMETRICS, frozenset(), is_gzip=False)[0].decode()
    units = [line.split(" ")[2:] for line in text.splitlines() if line.startswith("# UNIT hookd_")]
    assert ["hookd_x_wait_seconds", "seconds"] in units
    assert ["hookd_target_resident_memory_bytes", "bytes"] in units
    assert not [name for name, _ in units if name.startswith("hookd_x_mean")]


def test_the_heartbeats_age_is_the_daemons_own_time_since_the_last_event(join, fleet):
    now = [100.0]
    page = join()
    fleet.listed[0].close()
    target = fleet.listed[0] = Target(os.getpid(), os.dup(page.fd), clock=lambda: now[0])
    base = page.thread(1, "main")
    for events, clock in ((1, 101.0), (2, 105.0)):
        page.cells[base + EVENTS] = events
        now[0] = clock
        target.poll()
    now[0] = 112.0
    target.poll()
    assert target.heartbeat_age_s() == 7.0


def test_incidents_of_the_daemon_stand_beside_those_of_the_page_and_a_page_cannot_double_them(join, fleet, scrape):
    page = join()
    put(page, "hookd_incidents", "counter", 2, {"kind": "nan"})
    put(page, "hookd_incidents", "counter", 99, {"kind": "hang"})
    fleet.listed[0].reported = {"hang": 3}
    found = scrape()
    assert found[key("hookd_incidents_total", kind="nan")] == 2
    assert found[key("hookd_incidents_total", kind="hang")] == 3


def test_while_a_rank_hangs_nothing_is_served_as_if_it_were_of_now(join, fleet, scrape):
    page = join()
    of_steps = ("hookd_activations_loss", "hookd_overhead_ratio")
    for name in (*of_steps, "hookd_learning_rate", "hookd_activations_finding", "hookd_nan_origin"):
        put(page, name, "gauge", 1.0)
    put(page, "hookd_activations_losses", "counter", 5)
    before = scrape()
    fleet.listed[0].hang = {"role": "waits"}
    during = scrape()
    fleet.listed[0].hang = None
    assert {name for name, *_ in before.keys() - during.keys()} == set(of_steps)
    assert scrape().keys() == before.keys()


WAITED = Declared("hookd_test_waited_seconds", "counter", "Of this test.")


class Waiting:
    families = (WAITED,)

    def poll(self, targets):
        """Look at nothing."""

    def samples(self, target):
        return [Sample(WAITED, {"phase": "data"}, 7.0)]


def test_a_page_of_ever_new_kinds_of_incidents_is_a_few_series(join, scrape):
    page = join()
    for n in range(500):
        put(page, "hookd_incidents", "counter", 2, {"kind": f"kind{n}"})
    found = {dict(name[1:])["kind"]: value for name, value in scrape().items() if name[0] == "hookd_incidents_total"}
    assert len(found) == len(FROM_ZERO) + MOST_OF_TARGET + 1
    assert found["other"] == 2 * (500 - MOST_OF_TARGET)
    assert sum(found.values()) == 1000


def test_a_core_family_of_a_hostile_page_is_bounded(join, scrape):
    page = join()
    for n in range(MAX_CORE + 200):
        put(page, "hookd_modules", "gauge", 1, {"state": f"state{n}"})
    assert len([name for name in scrape() if name[0] == "hookd_modules"]) <= MAX_CORE


def test_a_watchers_samples_are_served_and_no_page_may_use_their_name(join, fleet):
    put(join(), "hookd_test_waited_seconds", "counter", 5)
    collector = FleetCollector(fleet, AttachCounter(), Limits(), watchers=[Waiting()])
    found = samples_of(parse_text(render(collector, "", frozenset(), is_gzip=False)[0].decode()))
    assert [value for (name, *_), value in found.items() if name == "hookd_test_waited_seconds_total"] == [7.0]


class Failing:
    families = (WAITED,)

    def poll(self, targets):
        raise ValueError(f"{len(targets)} targets are too many")

    def samples(self, target):
        yield Sample(WAITED, {"phase": "data"}, 7.0)
        raise KeyError(target.pid)


def test_a_watcher_that_fails_is_reported_once_and_takes_neither_the_others_nor_the_scrape_with_it(join, fleet, caplog):
    put(join(), "hookd_steps", "counter", 5)
    guarded = Guarded(Failing())
    collector = FleetCollector(fleet, AttachCounter(), Limits(), watchers=[guarded, Waiting()])
    for _ in range(3):
        guarded.poll(fleet.targets())
        text = render(collector, "", frozenset(), is_gzip=False)[0].decode()
    values = [
        value for (name, *_), value in samples_of(parse_text(text)).items() if "waited" in name or "steps" in name
    ]
    assert sorted(values) == [5, 7]
    assert [one.message[:18] for one in caplog.records] == ["Failing has failed"] * 2, "each of its two mistakes"


def test_name_parameters_restrict_the_page(join, fleet):
    put(join(), "hookd_steps", "counter", 5)
    collector = FleetCollector(fleet, AttachCounter(), Limits())
    body, _ = render(collector, "", frozenset({"hookd_steps_total", "hookd_target_up"}), is_gzip=False)
    assert {name for name, *_ in samples_of(parse_text(body.decode()))} == {"hookd_steps_total", "hookd_target_up"}


def test_a_family_is_asked_for_by_its_own_name_or_by_that_of_one_of_its_samples(join, fleet):
    page = join()
    put(page, "hookd_steps", "counter", 5)
    put(page, "hookd_x_mean", "gauge", 1)
    collector = FleetCollector(fleet, AttachCounter(), Limits())
    for name, sample in (("hookd_steps", "hookd_steps_total"), ("hookd_steps_total",) * 2, ("hookd_x_mean",) * 2):
        body, _ = render(collector, "", frozenset({name}), is_gzip=False)
        assert {one for one, *_ in samples_of(parse_text(body.decode()))} == {sample}


def test_a_compressed_page_is_the_same_page(join, fleet):
    put(join(), "hookd_steps", "counter", 5)
    collector = FleetCollector(fleet, AttachCounter(), Limits())
    body, _ = render(collector, "", frozenset({"hookd_steps"}), is_gzip=True)
    assert gzip.decompress(body) == render(collector, "", frozenset({"hookd_steps"}), is_gzip=False)[0]


def test_attaches_are_counted_by_result_with_their_pauses(fleet):
    tally = AttachCounter()
    tally.count("ok", 0.00015)
    tally.count("ok", 20.0)
    tally.count("timeout")
    found = samples_of(
        parse_text(render(FleetCollector(fleet, tally, Limits()), "", frozenset(), is_gzip=False)[0].decode())
    )
    assert found["hookd_attach_total", ("result", "ok")] == 2
    assert found["hookd_attach_total", ("result", "timeout")] == 1
    assert found["hookd_attach_pause_seconds_bucket", ("le", "0.0002")] == 1
    assert found["hookd_attach_pause_seconds_bucket", ("le", "+Inf")] == 2


@pytest.mark.parametrize("bound", PAUSE_BUCKETS_S)
def test_a_pause_as_long_as_a_bound_counts_in_its_bucket(fleet, bound):
    tally = AttachCounter()
    tally.count("ok", bound)
    (pauses,) = [family for family in tally.families() if family.name == "hookd_attach_pause_seconds"]
    buckets = {one.labels["le"]: one.value for one in pauses.samples if one.name.endswith("_bucket")}
    assert [le for le, value in buckets.items() if float(le) < bound and value] == []
    assert next(value for le, value in buckets.items() if float(le) == bound) == 1
