"""Users beside users: whom the daemon serves first, and which job belongs to whom."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.tool.daemon.actions import YOUNG_S
from tests.attacks.attack import ATTACKER, VICTIM, Result, attack
from tests.attacks.people import folder_of, of_users, process_of, python_of_users
from tests.support.daemon import Daemon, tell
from tests.support.environment import REPOSITORY, tool_environment
from tests.support.processes import wait_until
from tests.support.tool import HOOKD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.processes import Process

PROGRAMS = Path(__file__).with_name("programs")
WITHIN_S = 5.0
"""How soon a legitimate attach must be done on an idle machine; a busy one gets more time."""


@contextlib.contextmanager
def serving(*arguments: str | Path, **settings: str) -> Iterator[Daemon]:
    """Start `hookd serve` as root, with the defaults for all settings that are not given."""
    with tempfile.TemporaryDirectory(prefix="attack-") as home:
        daemon = Daemon(Path(home), *arguments, **{"HOOKD_POLL_S": "1", "HOOKD_SCAN_S": "1", **settings})
        with daemon.process:
            yield daemon


@contextlib.contextmanager
def training(uid: int, **environment: str) -> Iterator[Process]:
    """Start a small training of a user; see `programs/job.py`. It prints `ready` after its first step."""
    more = {"HOOKD": "0", **of_users(), **environment}
    with process_of(uid, [python_of_users(), PROGRAMS / "job.py"], **more) as process:
        yield process


@contextlib.contextmanager
def fakes(count: int) -> Iterator[Process]:
    """Start processes of the attacker that ask for hookd and never answer it; see `programs/fakes.py`."""
    with folder_of(ATTACKER) as folder:
        library = folder / "libtorch_stub.so"
        library.write_bytes(bytes(4096))
        with process_of(ATTACKER, [python_of_users(), "-S", PROGRAMS / "fakes.py", library], HOOKD="1") as parent:
            parent.expect("^ready$")
            parent.ask(str(count), f"^{count}$")
            yield parent


def attach_by_rule(daemon: Daemon, job: Process) -> float:
    """Make a job ask for hookd; return how many seconds passed until it was served."""
    begun = time.monotonic()
    job.ask("ask", "^null$")
    wait_until(lambda: _is_served(daemon, job.pid), what="the attach by rule")
    return time.monotonic() - begun


def _is_served(daemon: Daemon, pid: int) -> bool:
    return any(row["pid"] == pid and row["state"] == "attached" for row in daemon.client.targets())


@attack(
    "another user",
    "1,000 processes that ask for hookd and never answer, to keep it from another user's job",
    tries=1000,
    short=60,
    is_long=True,
)
def fakes_delay_others(count: int) -> Result:
    with contextlib.ExitStack() as stack:
        by_rule, asked_for = (stack.enter_context(training(VICTIM)) for _ in range(2))
        daemon = stack.enter_context(serving(HOOKD_TIMEOUT_S="10" if count >= 1000 else "5"))
        for job in (by_rule, asked_for):
            job.expect("^ready$")
        begun = time.monotonic()
        daemon.client.attach(asked_for.pid, timeout_s=60)
        usual_s = time.monotonic() - begun
        daemon.client.detach(asked_for.pid)
        stack.enter_context(fakes(count))
        wait_until(lambda: daemon.metrics().total("hookd_attach_total", result="blocked"), what="attaches to the fakes")
        begun = time.monotonic()
        by_rule.ask("ask", "^null$")
        daemon.client.attach(asked_for.pid, timeout_s=60)
        manual_s = time.monotonic() - begun
        wait_until(lambda: _is_served(daemon, by_rule.pid), 300, what="the attach by rule")
        rule_s = time.monotonic() - begun
    late = sum(seconds > WITHIN_S + 3 * usual_s for seconds in (manual_s, rule_s))
    seen = (
        f"beside {count:,} fakes: attached by rule after {rule_s:.1f} s, as asked after {manual_s:.1f} s, without them after "
        f"{usual_s:.1f} s"
    )
    return Result(2, late, seen)


HOLDER = REPOSITORY / "tests" / "support" / "page_holder.py"
RUN = "prod-llama"
NAMES = (
    "root\n1 attached root train.py", "train.py\x1b[1A\x1b[2K root", "\u202etoor\u202c train.py", "\u2028root\u2066", "<b>root</b>",
    "\rroot", "root",
)  # fmt: skip
"""Names with which a process poses as somebody else's."""
DEVICES = "\x1b\r\u202e\u202c\u2028\u2066"
"""Characters that change how a terminal or a page shows text."""


@contextlib.contextmanager
def page_of(uid: int, *, name: str = "", **identity: object) -> Iterator[Process]:
    """Start a process of a user whose page claims to be a rank of a run."""
    command = [python_of_users(), HOLDER, json.dumps({"run": RUN, **identity}), name]
    with process_of(uid, command, **of_users()) as process:
        process.expect("^ready$")
        yield process


def _rank(uid: int, rank: int, *, run: str = RUN) -> contextlib.AbstractContextManager[Process]:
    return page_of(uid, rank=rank, world_size=2, run=run)


def _runs(daemon: Daemon) -> dict[int, str]:
    """Return the run under which each living process is served."""
    return {row["pid"]: row["run"] for row in daemon.client.targets() if row["state"] == "attached"}


def _says_worst(poser: Process) -> None:
    """Make a page claim a NaN, a hang, steps, and three different checksums of its weights."""
    tell(poser, incident={"kind": "nan", "message": "first NaN: layers.0 output", "step": 1, "time": time.time()})
    tell(poser, incident={"kind": "hang", "message": "rank 1 hangs in forward", "step": 1, "time": time.time()})
    tell(poser, put={"name": "hookd_steps", "kind": "counter", "value": 3})
    for mark in range(3):
        tell(
            poser, put={"name": "hookd_drift_checksum", "kind": "gauge", "value": mark, "labels": {"module": "(root)"}}
        )


def _reported_of(daemon: Daemon, pids: set[int]) -> list[str]:
    """Return what is wrong with how the run of these processes is shown."""
    runs, wrong = _runs(daemon), []
    mine = {runs.get(pid) for pid in pids}
    if len(mine) != 1:
        return [f"the victim's ranks are in runs {mine}"]
    (run,) = mine
    if {pid for pid, name in runs.items() if name == run} != pids:
        wrong.append("another's process is in the run")
    wrong += [f"incident: {row['message']}" for row in daemon.client.incidents(run=run) if row["pid"] not in pids]
    info = [one.labels for one in daemon.metrics().select("hookd_target_info") if one.labels["run"] == run]
    wrong += [f"owner {labels['user']}" for labels in info if labels["user"] != str(VICTIM)]
    page = daemon.get(f"/run/{run}")
    wrong += ["the page has no owner"] * (f"<b>{VICTIM}</b>" not in page) + ["NaN on the page"] * ("first NaN" in page)
    return wrong


@attack(
    "another user",
    "A process that takes the name of another user's run: joins it, renames itself, waits for a restart, its end, or both",
)
def run_of_another(_: int) -> Result:
    wrong: dict[str, list[str]] = {}
    with contextlib.ExitStack() as stack:
        sleeper = stack.enter_context(_rank(ATTACKER, 1, run="mine"))  # older than the victim's
        ranks = [stack.enter_context(_rank(VICTIM, rank)) for rank in (0, 1)]
        daemon = stack.enter_context(serving(HOOKD_POLL_S="0.2", HOOKD_SCAN_S="0.2"))
        pids = {rank.pid for rank in ranks}
        wait_until(lambda: pids <= _runs(daemon).keys(), what="the victim's ranks")
        posers = [stack.enter_context(_rank(ATTACKER, rank)) for rank in (1, 2)]
        tell(sleeper, rename={"run": RUN})
        for poser in (*posers, sleeper):
            _says_worst(poser)
        wait_until(
            lambda: len(_runs(daemon)) == 5 and _runs(daemon)[sleeper.pid] != "mine", what="the attacker's processes"
        )
        wait_until(lambda: len({row["pid"] for row in daemon.client.incidents()}) == 3, what="their incidents")
        wrong["joined or renamed"] = _reported_of(daemon, pids)
        again = stack.enter_context(_restarted(daemon))
        wait_until(lambda: len(_runs(again)) == 5, what="all processes")
        wrong["restarted"] = _reported_of(again, pids)
        ranks[0].signal(signal.SIGKILL)
        wait_until(lambda: len(_runs(again)) == 4, what="the end of rank 0")
        late = stack.enter_context(_rank(ATTACKER, 0))
        wait_until(lambda: late.pid in _runs(again), what="the late one")
        lingering = [row for row in again.client.targets() if row["pid"] == ranks[0].pid and row["run"] == RUN]
        wrong["ended"] = [] if lingering else ["the last counters of a rank that has ended are served no more"]
        before = {pid: run for pid, run in _runs(again).items() if pid not in pids}
        wrong["its name is free at a restart"] = _renamed(stack, again, ranks, before)
    seen = "; ".join(f"{how}: {', '.join(what)}" for how, what in wrong.items() if what)
    return Result(
        4, sum(map(bool, wrong.values())), seen or "each of the attacker's is a run of its own, with its owner"
    )


def _renamed(stack: contextlib.ExitStack, daemon: Daemon, ranks: list[Process], before: dict[int, str]) -> list[str]:
    """End a run while there is no daemon; return which of the others have another name afterwards."""
    next_one = stack.enter_context(_restarted(daemon, ranks))
    late = stack.enter_context(_rank(ATTACKER, 1))
    wait_until(lambda: before.keys() | {late.pid} <= _runs(next_one).keys(), what="the attacker's processes")
    runs = _runs(next_one)
    taken = [f"a new process is {RUN}"] if runs[late.pid] == RUN else []
    return taken + [f"{run} became {runs[pid]}" for pid, run in before.items() if runs[pid] != run]


@contextlib.contextmanager
def _restarted(daemon: Daemon, ending: Sequence[Process] = ()) -> Iterator[Daemon]:
    """Kill a daemon after it has stored whom it serves, end these processes, and start the next daemon on its state."""
    home = daemon.client.path.parent
    note = home / "state" / "held.json"
    wait_until(lambda: note.exists() and len(json.loads(note.read_text())) == len(_runs(daemon)), what="the note")
    daemon.process.signal(signal.SIGKILL)
    daemon.process.wait()
    for process in ending:
        process.signal(signal.SIGKILL)
        process.wait()
    again = Daemon(home, HOOKD_POLL_S="0.2", HOOKD_SCAN_S="0.2")
    with again.process:
        yield again


@attack(
    "another user",
    "Pages that name an agent which never answers: the next daemon asks each of them who holds it, and another user's agent, "
    "which the last daemon held, would go before its turn",
    tries=100,
    short=10,
    is_long=True,
)
def silent_agents(count: int) -> Result:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            tell(stack.enter_context(page_of(ATTACKER, method="attach")), silence={})
        job = stack.enter_context(training(VICTIM))
        job.expect("^ready$")
        daemon = stack.enter_context(serving(HOOKD_POLL_S="0.2", HOOKD_SCAN_S="0.2"))
        wait_until(lambda: len(_runs(daemon)) == count, what="the attacker's")
        daemon.client.attach(job.pid, timeout_s=60.0)
        again = stack.enter_context(_restarted(daemon))
        begun = time.monotonic()
        wait_until(lambda: _is_held(again, job.pid), timeout_s=60 + 3 * count, what="the hold of the next daemon")
        held_s = time.monotonic() - begun
    return Result(count, int(held_s > YOUNG_S + WITHIN_S), f"the other user's was held again after {held_s:.1f} s")


def _is_held(daemon: Daemon, pid: int) -> bool:
    return any(row["pid"] == pid and row["is_held"] for row in daemon.client.targets())


@attack(
    "another user",
    "A long chain of processes that look like fork servers, each waiting for the next, so that whoever follows it is busy or fails",
    tries=1000,
    short=600,
    is_long=True,
)
def chain_of_fork_servers(count: int) -> Result:
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(training(VICTIM))
        job.expect("^ready$")
        daemon = stack.enter_context(serving())
        name = [PROGRAMS / "chain.sh", "multiprocessing.forkserver", str(count)]
        chain = stack.enter_context(process_of(ATTACKER, ["/bin/bash", *name]))
        chain.expect("^ready$")
        rule_s, begun = attach_by_rule(daemon, job), time.monotonic()
        with _restarted(daemon) as again:
            ready_s = time.monotonic() - begun
            wait_until(lambda: _is_served(again, job.pid), what="the job")
    seen = f"beside {count}: attached by rule after {rule_s:.1f} s; the next daemon was ready after {ready_s:.1f} s"
    return Result(2, sum(seconds > 2 * WITHIN_S for seconds in (rule_s, ready_s)), seen)


@attack("another user", "A process that takes the name of a run before its owner does")
def name_taken_first(_: int) -> Result:
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(serving(HOOKD_POLL_S="0.2", HOOKD_SCAN_S="0.2"))
        for name in (RUN, f"{RUN}~1"):
            taker = stack.enter_context(_rank(ATTACKER, 0, run=name))
            _says_worst(taker)
        wait_until(lambda: len(_runs(daemon)) == 2, what="the attacker's")
        ranks = [stack.enter_context(_rank(VICTIM, rank)) for rank in (0, 1)]
        pids = {rank.pid for rank in ranks}
        wait_until(lambda: pids <= _runs(daemon).keys(), what="the victim's ranks")
        wrong = _reported_of(daemon, pids)
        seen = f"the owner's is {_runs(daemon)[ranks[0].pid].partition('~')[0]}~PID, and each is shown with its user"
    return Result(1, int(bool(wrong)), ", ".join(wrong) or seen)


@attack(
    "another user",
    "Names in command line, environment and page that pose as root's, or rewrite what is shown",
    tries=len(NAMES),
    short=2,
)
def names_that_pose(count: int) -> Result:
    wrong = []
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(serving(HOOKD_POLL_S="0.2", HOOKD_SCAN_S="0.2"))
        posers = [
            stack.enter_context(page_of(ATTACKER, name=name, run=name, rank=name, script=name))
            for name in NAMES[:count]
        ]
        for poser in posers:
            tell(poser, rename={"uid": 0})
        wait_until(lambda: len(_runs(daemon)) == count, what="the processes")
        environment = tool_environment(HOOKD_HOST=f"unix://{daemon.client.path}", COLUMNS="200")
        for words in (["status"], ["top"], *(["report", str(one.pid)] for one in posers[:2])):
            done = subprocess.run(
                [*HOOKD, *words], capture_output=True, text=True, check=False, timeout=60, env=environment
            )
            if set(done.stdout) & set(DEVICES) or str(ATTACKER) not in done.stdout or not done.stdout:
                wrong.append(f"hookd {words[0]}: {done.stdout[-300:]!r} {done.stderr[-300:]}")
        page = daemon.get("/")
        if set(page) & set(DEVICES) or "<b>root" in page or page.count(f"<td>{ATTACKER}</td>") != count:
            wrong.append("the first page")
        owners = {one.labels["user"] for one in daemon.metrics().select("hookd_target_info")}
        wrong += [f"owners {owners}"] * (owners != {str(ATTACKER)})
    return Result(count, len(wrong), "; ".join(wrong) or "one line each, and the owner that the kernel says")
