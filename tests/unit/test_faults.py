"""The owner of an exception that leaves a plugin: the plugin if it raised it, the training if a signal handler did."""

from __future__ import annotations

import asyncio
import ctypes
import select
import signal
import threading

import pytest

from hookd.target.plugins.faults import is_from_signal_handler
from tests.support.processes import PATIENCE_S


def raised(act) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        act()
    return caught.value


def raises(error):
    raise error


def raises_again(error):
    try:
        raise error
    except BaseException:  # noqa: TRY203
        raise


def closes():
    raise GeneratorExit from None


async def awaited():
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "act",
    [
        lambda: raises(KeyboardInterrupt()), lambda: raises_again(KeyboardInterrupt("Ctrl-C")),
        lambda: raises(asyncio.CancelledError()), closes, lambda: raises(SystemExit(3)), lambda: asyncio.run(awaited()),
        lambda: raises(StopIteration()), lambda: next(iter(())), lambda: int("x"),
    ],
)  # fmt: skip
def test_what_a_plugin_raises_is_its_own(act):
    assert not is_from_signal_handler(raised(act))


def interrupted_in_a_loop():
    threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    while True:
        pass


def interrupted_while_it_waits():
    threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    select.select([], [], [])


def interrupted_and_raised_on():
    try:
        interrupted_while_it_waits()
    except KeyboardInterrupt:  # noqa: TRY203
        raise


def interrupted_and_raised_on_by_name():
    try:
        interrupted_while_it_waits()
    except KeyboardInterrupt as error:
        raise error  # noqa: TRY201


@pytest.mark.parametrize(
    "act",
    [interrupted_in_a_loop, interrupted_while_it_waits, interrupted_and_raised_on, interrupted_and_raised_on_by_name],
)
def test_ctrl_c_is_the_trainings_wherever_it_comes(act):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    error = raised(act)
    assert type(error) is KeyboardInterrupt
    assert is_from_signal_handler(error)


def preempted(_number, _frame):
    raise KeyboardInterrupt("preempted")


def test_what_a_handler_of_the_trainings_raises_is_its(monkeypatch):
    before = signal.signal(signal.SIGINT, preempted)
    try:
        assert is_from_signal_handler(raised(interrupted_while_it_waits))
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_another_thread_throws_is_the_trainings():
    """As a notebook or a scheduler throws it into a thread that is not the main one."""
    found: list[bool] = []
    ready = threading.Event()

    def work():
        try:
            ready.set()
            while True:
                pass
        except KeyboardInterrupt as error:
            found.append(is_from_signal_handler(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(PATIENCE_S)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
    thread.join(PATIENCE_S)
    assert found == [True]
