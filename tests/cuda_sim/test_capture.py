"""Streams that are captured into graphs: what is refused then, and what that spoils."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.cuda_sim.cuda_library import Cuda, in_thread

ILLEGAL_STATE, UNSUPPORTED, SPOILT, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = (
    401, 900, 901, 905, 906, 907, 908,
)  # fmt: skip
GLOBAL, RELAXED = 0, 2


class At(NamedTuple):
    """A stream that the default one is not ordered with, one that it is, an event."""

    stream: int
    blocking: int
    event: int


@pytest.fixture
def at(cuda: Cuda) -> Iterator[At]:
    made = At(
        cuda.made("cuStreamCreate", 1),
        cuda.made("cuStreamCreate", 0),
        cuda.made("cuEventCreate", 2),
    )
    yield made
    cuda.ok("cuEventDestroy_v2", made.event)
    cuda.ok("cuStreamDestroy_v2", made.stream)
    cuda.ok("cuStreamDestroy_v2", made.blocking)


def state_of(cuda: Cuda, stream: int | None) -> tuple[int, int]:
    """The code of the question, and the answer."""
    answer = ctypes.c_int(-1)
    return cuda.cuStreamIsCapturing(stream, ctypes.byref(answer)), answer.value


def ended(cuda: Cuda, stream: int) -> int:
    return int(cuda.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p())))


def test_who_asks_spoils_nothing(cuda: Cuda, at: At) -> None:
    assert state_of(cuda, at.stream) == state_of(cuda, None) == (0, 0)
    with cuda.capturing(at.stream):
        assert state_of(cuda, at.stream) == (0, 1)
        assert state_of(cuda, at.blocking) == state_of(cuda, None) == (0, 0)
    with cuda.capturing(at.blocking):
        assert state_of(cuda, None)[0] == IMPLICIT
    assert state_of(cuda, at.stream) == (0, 0)


def test_work_on_a_captured_stream_is_not_run_here(cuda: Cuda, at: At) -> None:
    cuda.ok("cuStreamBeginCapture_v2", at.stream, RELAXED)
    with cuda.violating("is captured"):
        assert cuda.cuStreamQuery(at.stream) == UNSUPPORTED
    assert state_of(cuda, at.stream) == (0, 2)
    assert ended(cuda, at.stream) == SPOILT
    assert ended(cuda, at.stream) == ILLEGAL_STATE
    cuda.ok("cuStreamQuery", at.stream)


def test_the_default_stream_beside_a_blocking_stream(cuda: Cuda, at: At) -> None:
    assert cuda.cuStreamBeginCapture_v2(None, GLOBAL) == UNSUPPORTED
    cuda.ok("cuStreamBeginCapture_v2", at.blocking, RELAXED)
    with cuda.violating("is captured"):
        assert cuda.cuEventRecord(at.event, None) == IMPLICIT
    assert ended(cuda, at.blocking) == SPOILT


def test_waits_do_not_cross_the_boundary(cuda: Cuda, at: At) -> None:
    cuda.ok("cuStreamBeginCapture_v2", at.stream, RELAXED)
    with cuda.violating("crosses the boundary"):
        assert cuda.cuStreamWaitEvent(at.stream, at.event, 0) == ISOLATION
    assert ended(cuda, at.stream) == SPOILT
    cuda.ok("cuStreamBeginCapture_v2", at.stream, RELAXED)
    cuda.ok("cuEventRecord", at.event, at.stream)
    with cuda.violating("crosses the boundary"):
        assert cuda.cuStreamWaitEvent(at.blocking, at.event, 0) == ISOLATION
    assert ended(cuda, at.stream) == SPOILT


def test_an_event_of_a_graph_is_never_done(cuda: Cuda, at: At) -> None:
    cuda.ok("cuStreamBeginCapture_v2", at.stream, RELAXED)
    cuda.ok("cuEventRecord", at.event, at.stream)
    assert cuda.cuEventQuery(at.event) == CAPTURED_EVENT
    assert ended(cuda, at.stream) == SPOILT
    assert cuda.cuEventSynchronize(at.event) == CAPTURED_EVENT
    cuda.ok("cuEventRecord", at.event, at.stream)
    cuda.ok("cuEventSynchronize", at.event)


def test_unsafe_calls_of_all_threads(cuda: Cuda, at: At) -> None:
    cuda.ok("cuStreamBeginCapture_v2", at.stream, GLOBAL)
    with cuda.violating("spoils the capture"):
        assert in_thread(lambda: cuda.cuEventQuery(at.event)) == UNSUPPORTED  # without a context
    here = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(here))
    assert in_thread(lambda: [cuda.cuCtxSetCurrent(here), ended(cuda, at.stream)]) == [
        0,
        WRONG_THREAD,
    ]
    assert ended(cuda, at.stream) == 0
    cuda.ok("cuStreamBeginCapture_v2", at.stream, RELAXED)
    cuda.ok("cuEventQuery", at.event)
    assert ended(cuda, at.stream) == 0


def test_a_stream_says_its_context(cuda: Cuda, at: At) -> None:
    def context_of(stream: int | None) -> tuple[int, int | None]:
        out = ctypes.c_void_p()
        return cuda.cuStreamGetCtx(stream, ctypes.byref(out)), out.value

    here = context_of(None)[1]
    assert here is not None
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    assert context_of(at.stream) == (0, here)
    assert context_of(None) == (0, own)
    cuda.ok("cuCtxDestroy_v2", own)
    assert in_thread(lambda: [context_of(at.stream), context_of(None)[0]]) == [(0, here), 201]
    with cuda.violating("is none"):
        assert context_of(64)[0] == 400
