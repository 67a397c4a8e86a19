"""Links over HCCL: creation, refused peers, and cleanup after failures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvplan import LLMStatusCode
from kvplan.transport.hccl.metadata import Metadata
from tests.ascend.hccl_side import DEADLINE_S, Side, link_both
from tests.ascend.hccl_sides import MakeSide, error_of
from tests.ascend.simulator import Controls, Log
from tests.support.refusals import refused


def test_linking_without_the_peer_times_out(one: Side, two: Side, sim_log: Log) -> None:
    sim_log.restart()
    with refused(LLMStatusCode.LLM_LINK_FAILED) as error:
        one.transport.connect(two.transport.metadata(), timeout_ms=100)
    assert "HcclCommPrepare: 9" in str(error.value)
    counts = sim_log.counts("HcclCommBindMem", "HcclCommUnbindMem", "HcclCommDestroy")
    assert counts["HcclCommBindMem"] == counts["HcclCommUnbindMem"] > 0
    assert counts["HcclCommDestroy"] == 1


def test_different_sessions_are_not_linked(one: Side, two: Side) -> None:
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(error_of, end.transport.connect, other, timeout_ms=100, session=session)
            for end, other, session in (
                (one, two.transport.metadata(), b"1"),
                (two, one.transport.metadata(), b"2"),
            )
        ]
        for call in calls:
            assert call.result(DEADLINE_S).status_code == LLMStatusCode.LLM_LINK_FAILED
    link_both(one, two, session=b"1")


def test_a_failure_at_one_side_ends_linking_at_the_other(
    one: Side, two: Side, simulator: Controls
) -> None:
    simulator.add_fault("HcclCommBindMem:2=4")
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(error_of, end.transport.connect, other, timeout_ms=100)
            for end, other in (
                (one, two.transport.metadata()),
                (two, one.transport.metadata()),
            )
        ]
        errors = [call.result(DEADLINE_S) for call in calls]
    assert {error.status_code for error in errors} == {LLMStatusCode.LLM_LINK_FAILED}
    assert any("HcclCommBindMem: 4" in str(error) for error in errors)
    link_both(one, two)


def test_a_transport_may_be_closed_while_it_connects(one: Side, two: Side) -> None:
    metadata = two.transport.metadata()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(error_of, one.transport.connect, metadata, timeout_ms=1000)
        while not (one.transport._hccl._open or call.done()):
            pass
        one.transport.close()
        error = call.result(DEADLINE_S)
    assert error.status_code == LLMStatusCode.LLM_LINK_FAILED


def test_one_device_cannot_be_both_ends(one: Side, make_side: MakeSide) -> None:
    other = make_side(0)
    reason = one.transport.refusal(other.transport.metadata())
    assert reason is not None
    assert "a DeviceId of its own" in reason


def test_other_products_are_refused(one: Side, two: Side) -> None:
    theirs = Metadata.from_bytes(two.transport.metadata())
    metadata = msgspec.structs.replace(theirs, product="950").to_bytes()
    assert "of product 950, this one of A2" in (one.transport.refusal(metadata) or "")
    with refused(LLMStatusCode.LLM_LINK_FAILED):
        one.transport.connect(metadata, timeout_ms=1)


def test_invalid_metadata_is_refused(one: Side) -> None:
    assert "expected `object`" in (one.transport.refusal(b"{") or "")
    with refused(LLMStatusCode.LLM_PARAM_INVALID):
        one.transport.connect(b"{", timeout_ms=1)
