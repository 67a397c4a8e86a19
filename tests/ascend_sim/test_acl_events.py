"""Events of three kinds, each with rules of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.ascend_sim.acl_library import Acl

INVALID, PARAM, HANDLE, ABORTED, UNSUPPORTED = 100000, 107000, 107017, 107023, 207000
STREAM_TIMEOUT, EVENT_TIMEOUT = 507046, 507047
SYNC, TIME = 0x1, 0x8
KINDS = {
    "plain": ("aclrtCreateEvent", ()),
    "flagged": ("aclrtCreateEventWithFlag", (SYNC,)),
    "ex": ("aclrtCreateEventExWithFlag", (SYNC | TIME,)),
}


@pytest.fixture
def streams(acl: Acl) -> Iterator[list[int]]:
    made = [acl.made("aclrtCreateStream") for _ in range(2)]
    yield made
    for stream in made:
        acl.ok("aclrtDestroyStreamForce", stream)


@pytest.fixture(params=KINDS)
def event(acl: Acl, request: pytest.FixtureRequest) -> Iterator[int]:
    name, arguments = KINDS[request.param]
    made = acl.made(name, *arguments)
    yield made
    acl.ok("aclrtDestroyEvent", made)


@pytest.fixture
def ex(acl: Acl) -> Iterator[int]:
    made = acl.made("aclrtCreateEventExWithFlag", SYNC)
    yield made
    acl.ok("aclrtDestroyEvent", made)


def hang(acl: Acl, event: int, stream: int) -> None:
    """Record the event behind work that hangs until the stream is aborted."""
    acl.fault("aclrtRecordEvent:1=hang")
    acl.ok("aclrtRecordEvent", event, stream)


def test_a_stream_waits_for_another(acl: Acl, event: int, streams: list[int]) -> None:
    gate = acl.made("aclrtCreateEvent")
    acl.ok("aclrtStreamWaitEvent", streams[0], gate)
    acl.ok("aclrtRecordEvent", event, streams[0])
    acl.ok("aclrtStreamWaitEvent", streams[1], event)
    assert acl.aclrtSynchronizeStreamWithTimeout(streams[1], 1) == STREAM_TIMEOUT
    assert acl.aclrtSynchronizeEventWithTimeout(event, 1) == EVENT_TIMEOUT
    assert acl.stored("aclrtQueryEventStatus", event) == 0
    acl.ok("aclrtRecordEvent", gate, None)
    acl.ok("aclrtSynchronizeStream", streams[1])
    acl.ok("aclrtSynchronizeEvent", event)
    assert acl.stored("aclrtQueryEventStatus", event) == 1
    acl.ok("aclrtDestroyEvent", gate)


def test_a_stream_waits_for_the_latest_record_before_the_wait(
    acl: Acl, ex: int, streams: list[int]
) -> None:
    acl.ok("aclrtRecordEvent", ex, streams[0])
    acl.ok("aclrtSynchronizeStream", streams[0])
    acl.ok("aclrtStreamWaitEvent", streams[1], ex)
    hang(acl, ex, streams[0])
    acl.ok("aclrtSynchronizeStream", streams[1])
    acl.ok("aclrtStreamWaitEvent", streams[1], ex)
    assert acl.aclrtSynchronizeStreamWithTimeout(streams[1], 1) == STREAM_TIMEOUT


def test_waits_before_the_first_record_depend_on_the_kind(
    acl: Acl, event: int, streams: list[int]
) -> None:
    acl.ok("aclrtSynchronizeEvent", event)
    acl.ok("aclrtStreamWaitEvent", streams[1], event)
    code = acl.aclrtSynchronizeStreamWithTimeout(streams[1], 1)
    is_recorded = acl.stored("aclrtQueryEventStatus", event) == 1
    assert code == (0 if is_recorded else STREAM_TIMEOUT)
    acl.ok("aclrtRecordEvent", event, streams[0])
    acl.ok("aclrtSynchronizeStream", streams[1])


def test_an_aborted_record_ends_the_wait(acl: Acl, event: int, streams: list[int]) -> None:
    hang(acl, event, streams[0])
    acl.ok("aclrtStreamAbort", streams[0])
    assert acl.aclrtSynchronizeEvent(event) == ABORTED


def test_an_abort_ends_the_wait_for_an_event(acl: Acl, event: int, streams: list[int]) -> None:
    hang(acl, event, streams[0])
    acl.ok("aclrtStreamWaitEvent", streams[1], event)
    assert acl.aclrtSynchronizeStreamWithTimeout(streams[1], 1) == STREAM_TIMEOUT
    acl.ok("aclrtStreamAbort", streams[1])
    acl.ok("aclrtSynchronizeStream", streams[1])
    # The record itself still hangs.
    assert acl.aclrtSynchronizeStreamWithTimeout(streams[0], 1) == STREAM_TIMEOUT


def test_events_for_time_cannot_be_waited_for(acl: Acl, streams: list[int]) -> None:
    made = acl.made("aclrtCreateEventExWithFlag", TIME)
    assert acl.aclrtStreamWaitEvent(streams[0], made) == UNSUPPORTED
    acl.ok("aclrtDestroyEvent", made)
    out = ctypes.byref(ctypes.c_void_p())
    assert acl.aclrtCreateEventExWithFlag(out, 0x100) == PARAM


def test_only_flagged_events_are_reset(acl: Acl, streams: list[int]) -> None:
    made = {kind: acl.made(name, *arguments) for kind, (name, arguments) in KINDS.items()}
    for event in made.values():
        acl.ok("aclrtRecordEvent", event, streams[0])
    codes = {kind: acl.aclrtResetEvent(event, streams[0]) for kind, event in made.items()}
    assert codes == {"plain": UNSUPPORTED, "flagged": 0, "ex": UNSUPPORTED}
    acl.ok("aclrtStreamWaitEvent", streams[1], made["flagged"])
    assert acl.aclrtSynchronizeStreamWithTimeout(streams[1], 1) == STREAM_TIMEOUT
    assert acl.stored("aclrtQueryEventWaitStatus", made["flagged"]) == 1
    acl.ok("aclrtRecordEvent", made["flagged"], streams[0])
    acl.ok("aclrtSynchronizeStream", streams[1])
    assert acl.stored("aclrtQueryEventWaitStatus", made["flagged"]) == 0
    out = ctypes.byref(ctypes.c_int32())
    assert acl.aclrtQueryEventWaitStatus(made["ex"], out) == UNSUPPORTED
    for event in made.values():
        acl.ok("aclrtDestroyEvent", event)


def test_destroyed_events_are_refused(acl: Acl, streams: list[int]) -> None:
    event = acl.made("aclrtCreateEvent")
    acl.ok("aclrtDestroyEvent", event)
    assert acl.aclrtDestroyEvent(event) == HANDLE
    assert acl.aclrtRecordEvent(event, streams[0]) == HANDLE
    assert acl.aclrtRecordEvent(streams[0], streams[0]) == HANDLE
    assert acl.aclrtStreamWaitEvent(streams[0], event) == HANDLE
    assert acl.aclrtSynchronizeEvent(event) == HANDLE
    assert acl.aclrtSynchronizeEvent(None) == INVALID
    assert acl.aclrtSynchronizeEventWithTimeout(event, 0) == PARAM


def test_an_event_may_be_destroyed_while_a_stream_waits(acl: Acl, streams: list[int]) -> None:
    event = acl.made("aclrtCreateEvent")
    acl.ok("aclrtStreamWaitEvent", streams[1], event)
    acl.ok("aclrtRecordEvent", event, streams[0])
    acl.ok("aclrtDestroyEvent", event)
    acl.ok("aclrtSynchronizeStream", streams[1])
    assert acl.aclrtRecordEvent(event, streams[0]) == HANDLE


def test_time_between_events_is_measured(acl: Acl, streams: list[int]) -> None:
    start, end = (acl.made("aclrtCreateEvent") for _ in range(2))
    elapsed = ctypes.c_float(-1)
    assert acl.aclrtEventElapsedTime(ctypes.byref(elapsed), start, end) == PARAM
    acl.ok("aclrtRecordEvent", start, streams[0])
    acl.ok("aclrtRecordEvent", end, streams[0])
    acl.ok("aclrtSynchronizeStream", streams[0])
    acl.ok("aclrtEventElapsedTime", ctypes.byref(elapsed), start, end)
    assert 0 <= elapsed.value < 1000
    acl.ok("aclrtDestroyEvent", start)
    acl.ok("aclrtDestroyEvent", end)
