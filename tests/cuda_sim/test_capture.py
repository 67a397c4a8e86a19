"""Captures of streams into graphs: calls that are refused, and calls that invalidate captures."""

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


class Objects(NamedTuple):
    """A stream that the default stream does not wait for, one that it waits for, and an event."""

    stream: int
    blocking: int
    event: int


@pytest.fixture
def objects(cuda: Cuda) -> Iterator[Objects]:
    made = Objects(
        cuda.made("cuStreamCreate", 1),
        cuda.made("cuStreamCreate", 0),
        cuda.made("cuEventCreate", 2),
    )
    yield made
    cuda.ok("cuEventDestroy_v2", made.event)
    cuda.ok("cuStreamDestroy_v2", made.stream)
    cuda.ok("cuStreamDestroy_v2", made.blocking)


def state_of(cuda: Cuda, stream: int | None) -> tuple[int, int]:
    """Return the code of cuStreamIsCapturing, and its answer."""
    answer = ctypes.c_int(-1)
    return cuda.cuStreamIsCapturing(stream, ctypes.byref(answer)), answer.value


def end_capture(cuda: Cuda, stream: int) -> int:
    return int(cuda.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p())))


def test_queries_of_the_capture_state_keep_the_capture_valid(cuda: Cuda, objects: Objects) -> None:
    assert state_of(cuda, objects.stream) == state_of(cuda, None) == (0, 0)
    with cuda.capturing(objects.stream):
        assert state_of(cuda, objects.stream) == (0, 1)
        assert state_of(cuda, objects.blocking) == state_of(cuda, None) == (0, 0)
    with cuda.capturing(objects.blocking):
        assert state_of(cuda, None)[0] == IMPLICIT
    assert state_of(cuda, objects.stream) == (0, 0)


def test_a_query_of_a_captured_stream_invalidates_the_capture(cuda: Cuda, objects: Objects) -> None:
    cuda.ok("cuStreamBeginCapture_v2", objects.stream, RELAXED)
    with cuda.violating("is captured"):
        assert cuda.cuStreamQuery(objects.stream) == UNSUPPORTED
    assert state_of(cuda, objects.stream) == (0, 2)
    assert end_capture(cuda, objects.stream) == SPOILT
    assert end_capture(cuda, objects.stream) == ILLEGAL_STATE
    cuda.ok("cuStreamQuery", objects.stream)


def test_work_on_the_default_stream_invalidates_a_capture_of_a_blocking_stream(
    cuda: Cuda, objects: Objects
) -> None:
    assert cuda.cuStreamBeginCapture_v2(None, GLOBAL) == UNSUPPORTED
    cuda.ok("cuStreamBeginCapture_v2", objects.blocking, RELAXED)
    with cuda.violating("is captured"):
        assert cuda.cuEventRecord(objects.event, None) == IMPLICIT
    assert end_capture(cuda, objects.blocking) == SPOILT


def test_waits_across_the_boundary_of_a_capture_are_refused(cuda: Cuda, objects: Objects) -> None:
    cuda.ok("cuStreamBeginCapture_v2", objects.stream, RELAXED)
    with cuda.violating("crosses the boundary"):
        assert cuda.cuStreamWaitEvent(objects.stream, objects.event, 0) == ISOLATION
    assert end_capture(cuda, objects.stream) == SPOILT
    cuda.ok("cuStreamBeginCapture_v2", objects.stream, RELAXED)
    cuda.ok("cuEventRecord", objects.event, objects.stream)
    with cuda.violating("crosses the boundary"):
        assert cuda.cuStreamWaitEvent(objects.blocking, objects.event, 0) == ISOLATION
    assert end_capture(cuda, objects.stream) == SPOILT


def test_a_captured_event_cannot_be_queried(cuda: Cuda, objects: Objects) -> None:
    cuda.ok("cuStreamBeginCapture_v2", objects.stream, RELAXED)
    cuda.ok("cuEventRecord", objects.event, objects.stream)
    assert cuda.cuEventQuery(objects.event) == CAPTURED_EVENT
    assert end_capture(cuda, objects.stream) == SPOILT
    assert cuda.cuEventSynchronize(objects.event) == CAPTURED_EVENT
    cuda.ok("cuEventRecord", objects.event, objects.stream)
    cuda.ok("cuEventSynchronize", objects.event)


def test_global_captures_forbid_unsafe_calls_of_all_threads(cuda: Cuda, objects: Objects) -> None:
    cuda.ok("cuStreamBeginCapture_v2", objects.stream, GLOBAL)
    with cuda.violating("spoils the capture"):
        # That thread has no context.
        assert in_thread(lambda: cuda.cuEventQuery(objects.event)) == UNSUPPORTED
    here = ctypes.c_void_p()
    cuda.ok("cuCtxGetCurrent", ctypes.byref(here))
    assert in_thread(lambda: [cuda.cuCtxSetCurrent(here), end_capture(cuda, objects.stream)]) == [
        0,
        WRONG_THREAD,
    ]
    assert end_capture(cuda, objects.stream) == 0
    cuda.ok("cuStreamBeginCapture_v2", objects.stream, RELAXED)
    cuda.ok("cuEventQuery", objects.event)
    assert end_capture(cuda, objects.stream) == 0


def test_a_stream_reports_its_context(cuda: Cuda, objects: Objects) -> None:
    def context_of(stream: int | None) -> tuple[int, int | None]:
        out = ctypes.c_void_p()
        return cuda.cuStreamGetCtx(stream, ctypes.byref(out)), out.value

    here = context_of(None)[1]
    assert here is not None
    own = cuda.made("cuCtxCreate_v2", 0, 0)
    assert context_of(objects.stream) == (0, here)
    assert context_of(None) == (0, own)
    cuda.ok("cuCtxDestroy_v2", own)
    assert in_thread(lambda: [context_of(objects.stream), context_of(None)[0]]) == [(0, here), 201]
    with cuda.violating("is none"):
        assert context_of(64)[0] == 400
