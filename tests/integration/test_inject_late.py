"""A stop in which the call does not return in time: the target is released soon, and recovers by itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from hookd.errors import AttachError
from hookd.tool.attach import AttachRequest, attach
from hookd.tool.linux import proc
from tests.support.environment import target_environment
from tests.support.processes import Process, wait_until

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="on other machines such a call is broken off"),
    pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler"),
]
SOURCE = Path(__file__).parents[1] / "attacks" / "programs" / "fake.c"


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """A program that poses as Python with torch, and as the C library too."""
    made = tmp_path_factory.mktemp("late") / "libc-python3.11"
    places = ["-DREGION=0x20000000UL", "-DSIZE=0x400000UL"]
    subprocess.run(["cc", "-O1", "-no-pie", "-rdynamic", *places, "-o", made, SOURCE], check=True, timeout=60)
    (made.parent / "libtorch_fake.so").write_bytes(bytes(4096))
    return made


@pytest.mark.parametrize(("mode", "reason"), [("late", "blocked"), ("chatty", "fault")])
def test_a_call_that_does_not_come_back_is_left_to_end_and_the_program_goes_on(fake, mode, reason):
    command = [fake, mode, fake.parent / "libtorch_fake.so"]
    with Process(command, env=target_environment(), stdin=True) as target:
        target.expect("^ready$")
        wait_until(lambda: proc.read(target.pid, "syscall").startswith(b"0 "), what="it waits for a line")
        with pytest.raises(AttachError) as caught:
            attach(target.pid, AttachRequest(plugins=()))
        assert caught.value.reason == reason
        assert proc.status(target.pid).tracer == 0
        target.send("")
        target.finish()
