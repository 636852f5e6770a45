"""Where attaching is impossible, the tests that attach are skipped with the reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.environment import WORKLOADS

TRACE_A_CHILD = """
import ctypes, os, signal
child = os.fork()
if not child:
    signal.pause()
libc = ctypes.CDLL(None, use_errno=True)
ok = libc.ptrace(0x4206, child, None, None) == 0 or exit(os.strerror(ctypes.get_errno()))
os.kill(child, signal.SIGKILL)
"""  # 0x4206: PTRACE_SEIZE


@pytest.fixture(scope="session")
def attachable():
    """Skip where this kernel or this sandbox forbids to trace even a child."""
    done = subprocess.run(
        [sys.executable, "-c", TRACE_A_CHILD], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"ptrace is not allowed here: {done.stderr.strip()}")


@pytest.fixture(scope="session")
def workloads():
    """Return the directory of the shared workloads, beside the repository."""
    if not (WORKLOADS / "charlm.py").exists():
        pytest.skip("the shared workloads are not beside this repository (../shared/workloads)")
    return WORKLOADS
