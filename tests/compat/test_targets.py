"""Every version and build of CPython as a target. `make compat` adds every version as a tool, see `test_tools.py`.

An interpreter without a torch gets a stub package of that name, enough for an injection and not for an agent: the tests
that say so in their names prove the injection and nothing more.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import shutil
import subprocess
from pathlib import Path

import pluggy
import pytest

from hookd.errors import TargetUnsupported
from hookd.wire import tested_versions
from tests.compat.trainings import training_on, watched
from tests.support import interpreters, made_up, stub
from tests.support.environment import REPOSITORY, TARGETS, target_environment
from tests.support.importing import assert_modules_stay, lay_widths
from tests.support.processes import Process, wait_until
from tests.targets.no_memory import PROGRAMS

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

BUSY = """
values = [i * 0.37 for i in range(300)]
wanted = sum(v * v / 3.1 for v in values)
def step():
    assert sum(v * v / 3.1 for v in values) == wanted
until_stopped(step)
"""
BUILDS = [pytest.param(*one, id=f"{one[0][0]}.{one[0][1]}-{one[1]}")
          for one in itertools.product(interpreters.VERSIONS, ("shared", "static"))]  # fmt: skip


@pytest.mark.parametrize(("minor", "build"), BUILDS)
def test_an_injection_with_a_stub_for_torch(minor, build):
    pythons = [one for one in interpreters.found() if one.minor == minor and one.is_shared == (build == "shared")]
    if not pythons:
        pytest.skip(
            f"no CPython {minor[0]}.{minor[1]} with a {build} libpython here; HOOKD_COMPAT_PYTHONS can name one"
        )
    for python in pythons:
        with python.directory() as directory, stub.start(directory, BUSY, python) as target:
            threads = stub.threads(target.pid)
            for _ in range(5):
                stub.inject(target.pid)
            wait_until(lambda: stub.threads(target.pid) == threads, what="the threads end")  # noqa: B023
            assert stub.mailboxes(target.pid) == 0
            stub.finish(target)


def newest():
    """Return those of the newest version that hookd was tried on."""
    found = [one for one in interpreters.found() if one.minor == tested_versions.NEWEST_PYTHON]
    return found or pytest.skip(
        f"no CPython {tested_versions.version_text(tested_versions.NEWEST_PYTHON)} here: untested"
    )


@pytest.mark.compat
def test_a_version_that_nobody_knows_is_attached_to_by_the_table_of_the_newest():
    for python in newest():
        with python.directory() as directory, made_up.start(directory, BUSY, python) as target:
            assert stub.inject(target.pid).method == "remote-debug"
            stub.finish(target)


@pytest.mark.compat
def test_a_version_that_nobody_knows_is_refused_where_its_table_has_another_size():
    for python in newest():
        with python.directory() as directory, made_up.start(directory, BUSY, python, resized=8) as target:
            with pytest.raises(TargetUnsupported, match="debug table size") as caught:
                stub.inject(target.pid)
            assert caught.value.reason == "python-version"
            stub.finish(target)


@pytest.mark.parametrize(
    "where", [pytest.param("here", marks=pytest.mark.compat), *(interpreters.roots() or [interpreters.no_roots()])]
)
def test_a_training_is_watched_and_ends_as_if_nobody_had_been_there(where):
    python = interpreters.with_torch(where)
    plugins = ("nan", "timing", "activations", "learning")
    with training_on(python) as training, watched(training, *plugins) as attachment:
        metrics = attachment.metrics()
        assert metrics.labels("hookd_timing_forward_seconds_total", "module") >= {"0", "1", "2"}
        assert metrics.labels("hookd_target_info", "python") == {".".join(map(str, python.version))}
        assert metrics.labels("hookd_target_info", "torch") == {python.torch}
        assert metrics.total("hookd_attach_pause_seconds_count") == 1
        # Without a stop from 3.14 on.
        assert (metrics.total("hookd_attach_pause_seconds_sum") == 0) == (python.minor >= (3, 14))


@pytest.mark.parametrize(
    "where", [pytest.param("here", marks=pytest.mark.compat), *(interpreters.roots() or [interpreters.no_roots()])]
)
def test_a_hookd_that_is_installed_beside_the_training_stays_importable(where):
    python = interpreters.with_torch(where)
    with python.directory() as directory:
        lay_widths(directory)
        installed = directory / "program"
        lay_hookd(installed, "hookd_nan", "hookd_timing")
        shutil.copy(TARGETS / "importing.py", directory)
        command = [*python.command, python.inside(directory / "importing.py")]
        environment = target_environment(PYTHONPATH=python.inside(installed))
        with Process(command, env=environment, cwd=directory, stdin=True) as process:
            process.expect("^ready$")
            assert_modules_stay(process, directory, is_first=False)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "module",
    [
        "tests.support.odd",
        *(f"tests.targets.no_memory {one.__name__}" for one in PROGRAMS),
        "tests.support.kinds --tensors 20000",
    ],
)
@pytest.mark.parametrize("where", interpreters.roots() or [interpreters.no_roots()])
def test_a_training_with_hookd_in_it_goes_as_it_does_without(where, module):
    python = interpreters.with_torch(where)
    with python.directory() as directory:
        lay_hookd(directory, *(path.name for path in (REPOSITORY / "plugins").glob("hookd_*")))
        for part in ("support", "targets"):
            shutil.copytree(REPOSITORY / "tests" / part, directory / "tests" / part)

        def outcome(*arguments):
            command = [*python.command, "-m", *module.split(), *arguments]
            done = subprocess.run(
                command, env=target_environment(PYTHONPATH=str(python.inside(directory))), cwd=directory,
                capture_output=True, text=True, timeout=1700, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{done.returncode}: {done.stdout[-3000:]} {done.stderr[-2000:]}"
            return done.stdout

        plugins = [
            f"{name}:every=1"
            for name in ("nan", "timing", "activations", "learning", "optimizer", "memory", "coverage")
        ]
        if "no_memory" in module:
            assert outcome(*plugins) == outcome()
        else:
            assert outcome()


def lay_hookd(directory, *plugins):
    """Put hookd there as files: what pip would do is the same for every version."""
    shutil.copytree(REPOSITORY / "hookd", directory / "hookd")
    for plugin in plugins:
        shutil.copytree(REPOSITORY / "plugins" / plugin, directory / plugin)
    shutil.copytree(Path(pluggy.__file__).parent, directory / "pluggy")
    entries = [one for one in importlib.metadata.entry_points(group="hookd.plugins") if one.module in plugins]
    (directory / "here-1.dist-info").mkdir()
    lines = ["[hookd.plugins]", *(f"{one.name} = {one.value}" for one in entries)]
    (directory / "here-1.dist-info" / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (directory / "here-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: here\nVersion: 1\n")
