"""The moments at which signal handlers run, and locks that no interrupt leaves taken."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvnative._signals import Condition, GuardedLock, Mutex, signals_deferred
from tests.support.interrupts import Interrupts


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let SIGINT raise, even if pytest runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def arrive(number: int = signal.SIGINT) -> None:
    """Raise a signal, whose handler runs when Python next checks for signals."""
    signal.pthread_kill(threading.get_ident(), number)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    steps = []

    def interrupted() -> None:
        with signals_deferred:
            arrive()
            steps.append(1)
            with signals_deferred:
                steps.append(2)
            steps.append(3)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):  # no longer deferred
        arrive()


def test_each_handler_runs_once_in_the_end() -> None:
    handled: list[int] = []
    numbers = signal.SIGUSR1, signal.SIGTERM
    before = [signal.signal(i, lambda number, _: handled.append(number)) for i in numbers]
    try:
        with signals_deferred:
            for i in (*numbers, *numbers):
                arrive(i)
            assert not handled
        assert sorted(handled) == sorted(numbers)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_handler_that_is_set_inside_stays() -> None:
    handled: list[int] = []
    with signals_deferred:
        signal.signal(signal.SIGINT, lambda number, _: handled.append(number))
    arrive()
    assert handled == [signal.SIGINT]


def test_a_handler_of_a_c_library_gets_its_signals() -> None:
    """The library has replaced Python's handler without Python's knowledge."""
    handled: list[int] = []
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handled.append)
    ctypes.CDLL(None).signal(int(signal.SIGINT), handler)  # `interruptible` restores Python's
    with signals_deferred:
        arrive()
        assert not handled
    assert handled == [signal.SIGINT]


_FORKED_IN_A_BLOCK = """
import os, signal, sys, threading
from kvnative._signals import signals_deferred

signal.signal(signal.SIGINT, signal.default_int_handler)
arrive = lambda: os.kill(os.getpid(), signal.SIGINT)
codes = []

def child():
    try:
        for _ in range(100): pass  # what was sent to the parent is not the child's
    except KeyboardInterrupt:
        os._exit(1)
    try:
        with signals_deferred: arrive()
        os._exit(2)
    except KeyboardInterrupt:
        pass
    try:
        arrive()
        for _ in range(100): pass
        os._exit(3)
    except KeyboardInterrupt:
        os._exit(0)

def fork():
    with signals_deferred:
        child_pid = os.fork()
        if child_pid == 0 and sys.argv[1] == "inside": child()
    if child_pid == 0: child()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]))

with signals_deferred:
    arrive()
    if sys.argv[2] == "thread":
        forking = threading.Thread(target=fork)
        forking.start()
        forking.join()
    else:
        fork()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(codes.pop())
"""


@pytest.mark.parametrize("place", ["inside", "behind"])
@pytest.mark.parametrize("by", ["thread", "main"])
def test_a_child_that_is_forked_in_a_block_has_its_signals(place: str, by: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FORKED_IN_A_BLOCK, place, by]
    assert subprocess.run(command, check=False).returncode == 0


def test_an_error_of_the_block_is_raised() -> None:
    with pytest.raises(ValueError, match="mine"), signals_deferred:
        raise ValueError("mine")
    with pytest.raises(KeyboardInterrupt):
        arrive()


def test_entering_a_block_raises_nothing() -> None:
    """Otherwise a `finally` could skip its block, and the next block would defer nothing."""
    entered = 0

    def use() -> None:
        nonlocal entered
        try:
            pass
        finally:
            with signals_deferred:
                entered += 1

    interrupts = Interrupts("")  # in all modules, also Python's own
    while interrupts.call(use):
        assert entered >= interrupts.place - 1  # the first place precedes everything
    test_an_interrupt_waits_for_the_end_of_the_block()


def test_another_thread_defers_nothing() -> None:
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with signals_deferred:
            inside.set()
            over.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            arrive()
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("kind", [GuardedLock, Mutex, Condition])
def test_an_interrupt_leaves_no_lock_taken(kind: type[GuardedLock | Condition]) -> None:
    lock = kind()

    def use() -> None:
        with lock, suppress(ValueError):
            int("1")

    interrupts = Interrupts(__file__)
    while interrupts.call(use):
        assert is_free(lock), interrupts.place
    assert interrupts.place > 3


def is_free(lock: GuardedLock | Condition) -> bool:
    """Return whether another thread can take the lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def test_a_guarded_lock_is_an_rlock() -> None:
    lock = GuardedLock()
    with lock, lock:
        assert lock.acquire()
        lock.release()
    with pytest.raises(RuntimeError):
        lock.release()
    with suppress(ValueError), lock:
        raise ValueError
    with pytest.raises(RuntimeError):
        lock.release()
