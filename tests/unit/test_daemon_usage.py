"""The operating system's counters of a target, compared with psutil's."""

import os
import subprocess
import sys
import threading

import psutil
import pytest

from hookd.tool.daemon.fleet.usage import Usage, usage_of
from tests.support import emulated


@emulated.lacks("proc")
def test_it_is_what_psutil_says():
    end, started = threading.Event(), threading.Barrier(4)

    def wait():
        started.wait(60)
        end.wait(60)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(60)
    me = psutil.Process()
    try:
        used_before_s = sum(me.cpu_times()[:2])
        usage = usage_of(os.getpid(), Usage())
        assert usage.threads == me.num_threads() >= 4
        assert usage.fds == len(os.listdir("/proc/self/fd")) - 1  # that of the listing itself
        assert usage.rss_bytes == pytest.approx(me.memory_info().rss, rel=0.2)
        assert used_before_s - 0.02 <= usage.cpu_s <= sum(me.cpu_times()[:2]) + 0.02  # psutil's are ticks of 10 ms each
    finally:
        end.set()
        for thread in threads:
            thread.join()


@emulated.lacks("proc")
def test_of_another_process_and_of_one_that_has_gone():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        usage = usage_of(process.pid, Usage())
        assert usage.threads == 1
        process.kill()
    assert usage_of(process.pid, usage) == Usage(usage.cpu_s)
