"""Processes in disguise: with a title, by another name, or with an interpreter that is gone from the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hookd.errors import TargetUnsupported
from hookd.tool.attach import AttachRequest, attach, detach, discover, environment
from hookd.tool.config import PluginSpec
from hookd.tool.config.rules import ASKED_FOR, decide
from hookd.tool.daemon.auto_attach import traits
from tests.support import training
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import Process, wait_until
from tests.support.tool import Page
from tests.support.training import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

LIBRARIES = sysconfig.get_path("purelib")
REQUEST = AttachRequest(plugins=(), lease_s=None, timeout_s=60)


@contextlib.contextmanager
def titled(*more: str, **variables: str) -> Iterator[Process]:
    job = Job("titled.py", f"--libraries {LIBRARIES}")
    with training.start(job, *more, **variables) as process:
        process.expect("^ready$")
        yield process
        end(process)


def end(process: Process) -> None:
    process.popen.terminate()
    process.finish()
    assert process.err == []


@pytest.mark.parametrize("title", [pytest.param("ray::train", marks=pytest.mark.load), "a=b" * 3000])
def test_who_asks_for_hookd_or_wants_none_is_heard(title):
    with titled("--title", title, HOOKD="1", RANK="3") as process:
        found = environment.of(process.pid)
        assert found is not None
        assert (found["HOOKD"], found["RANK"], found["OMP_NUM_THREADS"]) == ("1", "3", "1")
        one = discover.inspect(process.pid)
        assert one is not None
        seen = traits(one)
        assert seen is not None
        assert decide((), seen) == ASKED_FOR
        attach(process.pid, REQUEST)
        assert detach(process.pid)["restored"] == "identity"


@pytest.mark.parametrize("hides", ["0", pytest.param("1", marks=pytest.mark.load)])
def test_an_opt_out_is_heeded_also_where_the_process_alone_knows_of_it(hides):
    with titled("--hides", hides, HOOKD_DISABLE="1") as process:
        assert discover.is_disabled(process.pid) == (hides == "0")
        with pytest.raises(TargetUnsupported) as caught:
            attach(process.pid, REQUEST)
        assert caught.value.reason == "disabled"
        assert not discover.holds_page(process.pid)


def test_an_interpreter_by_another_name_is_found(tmp_path):
    program = tmp_path / "trainer"
    shutil.copy(bare_python().resolve(), program)
    (site,) = bare_python().parents[1].glob("lib/python*/site-packages")
    variables = training.environment(PYTHONHOME=sys.base_prefix, PYTHONPATH=site)
    job = Job("titled.py", f"--libraries {LIBRARIES} --title a-program")
    with Process([program, *job.command()[1:]], env=variables, cwd=job.path.parent) as process:
        process.expect("^ready$")
        one = discover.inspect(process.pid)
        assert one is not None
        assert one.state == "attachable"
        attach(process.pid, REQUEST)
        assert detach(process.pid)["restored"] == "identity"
        end(process)


def test_a_program_that_has_python_in_it_is_found(tmp_path):
    with Process(
        [embedding(tmp_path), "--scene", "warehouse"], env=training.environment(**EMBEDDED), cwd=tmp_path
    ) as process:
        process.expect("^step 3 ")
        one = discover.inspect(process.pid)
        assert one is not None
        assert (one.state, list(one.cmdline[1:])) == ("attachable", ["--scene", "warehouse"])
        attach(process.pid, REQUEST)
        assert detach(process.pid)["restored"] == "identity"
        assert process.err == []


EMBEDDED = {"EXECUTABLE": bare_python(), "TRAINS": f"{TARGETS / 'mlp.py'} --steps 0 --pause 0.01"}


def embedding(directory: Path) -> Path:
    """Build the program; skip the test if a compiler or a library is missing."""
    name, headers = sysconfig.get_config_var("LDLIBRARY"), sysconfig.get_path("include")
    if ".so" not in name or shutil.which("g++") is None or not Path(headers, "Python.h").exists():
        pytest.skip("there is no C++ compiler, or no library of Python")
    where, program = sysconfig.get_config_var("LIBDIR"), directory / "simulator"
    library = name.removeprefix("lib").partition(".so")[0]
    flags = [f"-I{headers}", f"-L{where}", f"-Wl,-rpath,{where}", f"-l{library}", "-rdynamic"]
    command = ["g++", TARGETS / "embedding.cpp", "-o", program, *flags]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    return program


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to mount")
def test_an_interpreter_that_is_gone_from_the_disk():
    """As after an upgrade under a running job: modules that are imported for the first time no longer exist."""
    with training.start(Job("titled.py", f"--libraries {LIBRARIES} --gone 1")) as process:
        process.expect("^ready$")
        attach(
            process.pid,
            replace(REQUEST, plugins=tuple(map(PluginSpec.parse, ("nan", "timing", "activations", "memory")))),
        )
        with Page.of(process.pid) as page:
            wait_until(lambda: page.values()["hookd_steps"][()] > 3, what="steps")
        assert detach(process.pid)["restored"] == "identity"
        end(process)
