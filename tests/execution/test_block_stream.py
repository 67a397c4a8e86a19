"""A stream that waits for a task: the requests to the backend, and the errors of the caller."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvplan
from kvnative._backend import (
    KVN_DENIED,
    KVN_FAILED,
    KVN_INVALID,
    KVN_OK,
    KVN_PENDING,
    KVN_UNSUPPORTED,
    Backend,
    NativeError,
)
from kvplan import (
    CacheDesc,
    DataType,
    HostMemory,
    LLMException,
    LLMStatusCode,
    Rows,
    Transfer,
    Transfers,
    TransferTask,
)
from kvplan.execution.compute_events import stream_handle_of
from tests.support.refusals import refused
from tests.support.wrappers import delay, fail_at, streams, trace

DESC = CacheDesc(2, (8, 100), DataType.DT_UINT8)
PLAN = kvplan.plan(Transfer(Rows(DESC, [0, 1]), Rows(DESC, [5, 3])), local="dst")
STREAM = SimpleNamespace(cuda_stream=0x10)
FOREVER = 60_000.0


def memory() -> HostMemory:
    return HostMemory.from_arrays([np.zeros(DESC.tensor_nbytes, np.uint8) for _ in range(2)])


def stream_of(name: str, stream: Any) -> int:
    return stream_handle_of(name, stream, "cuda")


class Traced:
    """Transfers over a backend with slow requests, which records its calls."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.fd = os.open(file, os.O_CREAT | os.O_RDWR | os.O_APPEND)
        self.transfers: list[Transfers] = []

    def submit(self, ms: float = FOREVER, **answers: int) -> TransferTask:
        def wrap(backend: Backend) -> Backend:
            return trace(streams(delay(backend, ms), **answers), self.fd)

        self.transfers.append(Transfers(wrap=wrap))
        return self.transfers[-1].submit(PLAN, memory(), memory(), stream_of=stream_of)

    def answers(self) -> list[int]:
        """Return the answers of `block_stream`."""
        lines = map(json.loads, self.file.read_text().splitlines())
        return [line["status"] for line in lines if line["call"] == "block_stream"]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    made = Traced(tmp_path / "calls")
    yield made
    for transfer in made.transfers:
        transfer.close(cancel=True)
    os.close(made.fd)


def test_the_backend_is_asked_until_it_has_an_answer(traced: Traced) -> None:
    task = traced.submit(pending=3)
    task.block_stream(STREAM)
    assert traced.answers() == [KVN_PENDING] * 3 + [KVN_OK]
    assert not task.done
    task.block_stream(STREAM)
    assert traced.answers()[4:] == [KVN_OK]
    task.cancel()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (KVN_UNSUPPORTED, LLMStatusCode.LLM_FEATURE_NOT_ENABLED),
        (KVN_INVALID, LLMStatusCode.LLM_PARAM_INVALID),
        (KVN_DENIED, LLMStatusCode.LLM_LINK_FAILED),
        (KVN_FAILED, LLMStatusCode.LLM_FAILED),
    ],
)
def test_a_refusal_of_the_backend_is_reported(
    traced: Traced, status: int, code: LLMStatusCode
) -> None:
    task = traced.submit(pending=1, status=status)
    for _ in range(2):
        with refused(code, r"pull_blocks B2B: stream=.*: no stream 0x10"):
            task.block_stream(STREAM)
    assert not task.done
    task.cancel()


@pytest.mark.parametrize("failing", [False, True])
def test_the_backend_is_not_asked_about_a_finished_task(traced: Traced, failing: bool) -> None:
    task = traced.submit(FOREVER if failing else 0)
    if failing:
        task.cancel()
    else:
        task.wait()
    task.block_stream(STREAM)
    assert traced.answers() == []


@pytest.mark.parametrize("how", ["cancel", "timeout", "wait"])
def test_a_waiting_thread_does_not_block_others(traced: Traced, how: str) -> None:
    """A thread polls while the request is pending; others cancel it, or wait for it."""
    task = traced.submit(50 if how == "wait" else FOREVER, pending=-1)
    asking = threading.Thread(target=task.block_stream, args=(STREAM,))
    asking.start()
    if how == "cancel":
        task.cancel()
    elif how == "timeout":
        with refused("LLM_TIMEOUT"):
            task.wait(20)
    else:
        task.wait(FOREVER)
    asking.join()
    assert task.done


class InterruptedByTestError(Exception):
    """Raised by a signal handler."""


def test_a_signal_ends_the_wait_and_not_the_transfer(traced: Traced) -> None:
    def interrupt(_signal: int, _frame: object) -> None:
        raise InterruptedByTestError

    def block() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        task.block_stream(STREAM)

    task = traced.submit(pending=-1)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(InterruptedByTestError):
            block()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not task.done
    task.cancel()


def test_a_failed_transfer_holds_no_stream(traced: Traced) -> None:
    transfers = Transfers(wrap=lambda value: streams(fail_at(value, 0), status=KVN_FAILED))
    task = transfers.submit(PLAN, memory(), memory(), stream_of=stream_of)
    assert task.wait_done(FOREVER)
    task.block_stream(STREAM)
    with refused("LLM_FAILED", "descriptor 0"):
        task.wait()


@pytest.mark.parametrize("ms", [0, FOREVER])
def test_bytes_that_the_host_moves_are_refused(ms: float) -> None:
    """The call is refused before and after the bytes have arrived, to be predictable."""
    with Transfers(wrap=lambda value: delay(value, ms)) as transfers:
        task = transfers.submit(PLAN, memory(), memory(), stream_of=stream_of)
        if not ms:
            task.wait()
        with refused(
            "LLM_FEATURE_NOT_ENABLED", "not moved by work on a device's streams; wait .* host"
        ):
            task.block_stream(STREAM)
        task.cancel()


def test_without_an_accelerator_a_stream_is_refused() -> None:
    task = kvplan.submit(PLAN, memory(), memory())
    with refused("LLM_FEATURE_NOT_ENABLED", r"stream=.*: the engine has no accelerator"):
        task.block_stream(STREAM)


def test_a_stream_waits_for_layers(traced: Traced) -> None:
    transfers = Transfers(wrap=streams)
    task = transfers.layered(PLAN, memory(), memory())
    with refused("LLM_FEATURE_NOT_ENABLED", "layers that move when they are ready"):
        task.block_stream(STREAM)
    task.cancel()


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        (16, TypeError, r"stream=16 must be a stream.* with cuda_stream, not int"),
        (None, TypeError, "stream=None must be a stream"),
        (SimpleNamespace(cuda_event=16), TypeError, "must be a stream"),
        (SimpleNamespace(npu_stream=16), LLMException, "of another accelerator: it has npu_event"),
        (SimpleNamespace(cuda_stream=-1), LLMException, r"must be an int in \[0, 2\*\*64\)"),
        (SimpleNamespace(cuda_stream="x"), LLMException, "cuda_stream of SimpleNamespace must be"),
        (SimpleNamespace(__cuda_stream__=lambda: (1, 0)), LLMException, "speaks version 1"),
    ],
)
def test_a_wrong_stream_is_refused(
    traced: Traced, stream: Any, error: type[Exception], message: str
) -> None:
    task = traced.submit()
    with pytest.raises(error, match=message):
        task.block_stream(stream)
    assert traced.answers() == []
    task.block_stream(SimpleNamespace(__cuda_stream__=lambda: (0, 0)))
    assert traced.answers() == [KVN_OK]
    task.cancel()


def test_a_forked_child_cannot_use_the_task(traced: Traced) -> None:
    task = traced.submit()
    child = os.fork()
    if child == 0:
        try:
            task.block_stream(STREAM)
        except NativeError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    task.cancel()
