"""A program on NIXL, observed: records and findings, and an unchanged program."""

from __future__ import annotations

import gc
import math
import os
import types
import weakref
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplan.observe import surfaces
from kvplan.observe.agent import Agent
from kvplan.observe.calls import MAX_SEEN
from kvplan.observe.observer import peer_number
from kvplan.observe.plans import Regions, ranges_of, regions_of
from kvplan.observe.transfers import Table
from kvplan.recording import TransferRecord, read, who_wrote
from tests.observe.program import BLOCK, BLOCKS, LAYERS, Program, program, run
from tests.recording.operations import recorder

__all__ = ["program"]
MAX_PAIRS = 4096


def test_a_transfer_is_a_plan_with_its_blocks_and_request(program: Program) -> None:
    handle = program.make([1, 4], [7, 2], request="cmpl-7")
    assert program.agent.transfer(handle) == "DONE"
    recording = program.recording()
    assert recording.header.cluster_id == peer_number("decode")
    (transfer,) = recording.transfers
    assert (transfer.tag, transfer.operation) == ("cmpl-7", "pull_blocks")
    assert (transfer.peer, transfer.nbytes) == (peer_number("prefill"), LAYERS * 2 * BLOCK)
    assert transfer.plan is not None
    part = transfer.plan.part
    assert part.tables is not None
    assert (part.tables.src.tolist(), part.tables.dst.tolist()) == ([7, 2], [1, 4])
    assert (part.dst.num_tensors, part.dst.count, part.num_tensor_pairs) == (LAYERS, BLOCKS, LAYERS)
    (write,) = who_wrote(recording, transfer.cache_id, 4)
    assert (write.src_rows, write.source) == ((2,), peer_number("prefill"))


def test_the_plan_has_the_executed_copies(program: Program) -> None:
    handle = program.make([1, 4], [7, 2])
    program.agent.transfer(handle)
    for mine, theirs in ((1, 7), (4, 2)):
        rows = (slice(its * BLOCK, (its + 1) * BLOCK) for its in (mine, theirs))
        here, there = rows
        np.testing.assert_array_equal(program.here[:, here], program.there[:, there])
    (transfer,) = program.recording().transfers
    assert transfer.plan is not None
    from kvplan import reference

    rebuilt = [np.zeros((BLOCKS, BLOCK), np.uint8) for _ in range(LAYERS)]
    source = [its[: BLOCKS * BLOCK].copy() for its in program.there]
    reference.execute(transfer.plan, source, rebuilt)
    for layer, its in enumerate(rebuilt):
        moved = program.here[layer, : BLOCKS * BLOCK].reshape(BLOCKS, BLOCK)
        np.testing.assert_array_equal(its[[1, 4]], moved[[1, 4]])


def test_results_and_exceptions_are_unchanged(program: Program) -> None:
    with pytest.raises(ValueError, match="indices differ in length"):
        program.agent.make_prepped_xfer("READ", program.local, [1], program.remote, [1, 2])
    assert program.agent.register_memory([(1, 2, 0, "")]) == [(1, 2, 0, "")]
    assert type(program.agent).transfer.__name__ == "transfer"


@pytest.mark.parametrize("sizes", [[], [0], [BLOCK, 0]], ids=["none", "empty", "one of two empty"])
def test_a_list_that_cannot_move_ends_neither_the_recording_nor_its_readers(
    program: Program, sizes: list[int]
) -> None:
    agent, op = program.agent, "READ"
    here, there = (
        [(memory.ctypes.data + number * BLOCK, nbytes, 0) for number, nbytes in enumerate(sizes)]
        for memory in (program.here, program.there)
    )
    agent.transfer(agent.initialize_xfer(op, here, there, "prefill", b"odd"))
    lists = agent.prep_xfer_dlist("", here), agent.prep_xfer_dlist("prefill", there)
    rows = np.arange(len(sizes))
    agent.transfer(agent.make_prepped_xfer(op, lists[0], rows, lists[1], rows, b"odd"))
    agent.transfer(program.make([1], [2], request="cmpl-1"))
    *before, last = program.recording().transfers
    assert last.tag == "cmpl-1"
    assert all(transfer.plan is None for transfer in before)


def test_an_observer_that_fails_logs_it_once_and_stops(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    handle = program.make([1], [2])
    program.agent.make_prepped_xfer("READ", program.local, [1], program.remote, [2], 5)
    program.observer.flush()  # a message other than bytes
    assert not program.observer.calls.seen.active
    assert program.agent.transfer(handle) == "DONE"
    said = [its.message for its in caplog.records if "observing has ended" in its.message]
    assert len(said) == 1


def test_tensors_that_touch_in_memory_are_told_apart(program: Program) -> None:
    """Registrations tell tensors here apart, and the number of tensors those of the peer."""
    memory, theirs = (np.zeros((LAYERS, BLOCKS * BLOCK), np.uint8) for _ in range(2))
    program.agent.register_memory([(its.ctypes.data, BLOCKS * BLOCK, 0, "") for its in memory])
    program.local = program.agent.prep_xfer_dlist("", program.blocks(memory))
    program.remote = program.agent.prep_xfer_dlist("prefill", program.blocks(theirs))
    run(program, [1, 4], [7, 2])
    (transfer,) = program.recording().transfers
    assert transfer.plan is not None
    part = transfer.plan.part
    assert (part.src.num_tensors, part.src.count, part.num_tensor_pairs) == (LAYERS, BLOCKS, LAYERS)


def test_a_row_with_a_stride_and_a_count_is_that_many_ranges(program: Program) -> None:
    """A layer of vLLM 0.33 has this form; blocks do not touch here, and touch at the peer."""
    program.agent.register_memory([(program.here.ctypes.data, program.here.nbytes, 0, "")])
    for name, memory, stride in (("", program.here, BLOCK + 16), ("prefill", program.there, BLOCK)):
        rows = [(layer.ctypes.data, BLOCK, 0, stride, BLOCKS) for layer in memory]
        made = program.agent.prep_xfer_dlist(name, np.array(rows, np.int64), "DRAM")
        setattr(program, "remote" if name else "local", made)
    run(program, [1, 4], [7, 2])
    for mine, theirs in ((1, 7), (4, 2)):
        np.testing.assert_array_equal(
            program.here[:, mine * 80 : mine * 80 + BLOCK],
            program.there[:, theirs * BLOCK : (theirs + 1) * BLOCK],
        )
    (transfer,) = program.recording().transfers
    assert transfer.nbytes == LAYERS * 2 * BLOCK
    assert transfer.plan is not None
    part = transfer.plan.part
    assert part.tables is not None
    assert (part.tables.src.tolist(), part.tables.dst.tolist()) == ([7, 2], [1, 4])
    assert (part.dst.num_tensors, part.dst.count, part.num_tensor_pairs) == (LAYERS, BLOCKS, LAYERS)


FORMS: dict[str, Any] = {
    "lists": list, "tuples": tuple, "arrays": lambda its: np.array(its, np.int32),
    "strided arrays": lambda its: np.repeat(its, 2)[::2],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_indices_are_those_of_the_call(program: Program, form: str) -> None:
    """The program may change the indices later."""
    lists = [FORMS[form](Program.every_layer(its)) for its in ([1, 4], [7, 2])]
    handle = program.agent.make_prepped_xfer(
        "READ", program.local, lists[0], program.remote, remote_indices=lists[1], notif_msg="cmpl-7"
    )
    if form != "tuples":
        lists[0][:] = lists[1][:] = [0] * len(lists[0])
    program.agent.transfer(handle=handle)
    (transfer,) = program.recording().transfers
    assert transfer.plan is not None
    tables = transfer.plan.part.tables
    assert tables is not None
    assert (tables.src.tolist(), tables.dst.tolist()) == ([7, 2], [1, 4])
    assert transfer.tag == "cmpl-7"


@pytest.mark.parametrize("op", ["READ", "WRITE"])
@pytest.mark.parametrize(
    ("here", "there"),
    [
        ([1, 4, 9, 12, 17, 20], [7, 2, 15, 10, 23, 18]),  # all layers
        ([1, 4, 9, 12], [10, 15, 18, 23]),  # two layers, to others
        ([17], [3]),
        ([3, 2, 1], [16, 17, 18]),
        ([1, 9, 4, 12], [1, 9, 4, 12]),  # blocks before layers
        ([1, 4, 9, 13], [7, 2, 15, 10]),  # another block in the second layer
        ([7, 15, 16], [1, 8, 17]),
    ],
)
def test_the_recorded_plan_has_each_descriptor(
    program: Program, here: list[int], there: list[int], op: str
) -> None:
    """Some transfers are recorded twice by their tables, others are planned."""
    first, second = moved(program, op, [(here, there)] * 2)
    assert first.plan == second.plan


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_transfers_of_other_layers_of_the_same_lists_have_their_own_plans(
    program: Program, op: str
) -> None:
    """The recorder recognizes pairs of layers that it has recorded before."""
    first, second, both = [1, 4], [9, 12], [1, 4, 9, 12]
    tables = [(first, first), (first, second), (second, first), (both, both), (first, first)]
    moved(program, op, tables)


def moved(
    program: Program, op: str, tables: list[tuple[list[int], list[int]]]
) -> list[TransferRecord]:
    """Run transfers; check that each is recorded with its descriptors."""
    for here, there in tables:
        handle = program.agent.make_prepped_xfer(op, program.local, here, program.remote, there)
        program.agent.transfer(handle)
    transfers = program.recording().transfers
    for transfer, (here, there) in zip(transfers, tables, strict=True):
        assert transfer.plan is not None
        found = set()
        for part in transfer.plan.parts:
            for src, dst in zip(part.src_tensors, part.dst_tensors, strict=True):
                for src_offset, dst_offset, nbytes in part.segments.expanded():
                    assert nbytes == BLOCK
                    rows = src_offset // BLOCK, dst_offset // BLOCK
                    found.add((src * BLOCKS + rows[0], dst * BLOCKS + rows[1]))
        read, written = (there, here) if op == "READ" else (here, there)
        assert found == set(zip(read, written, strict=True))
        assert transfer.nbytes == len(here) * BLOCK
    return transfers


def test_a_forked_child_observes_its_own_agents_only(program: Program) -> None:
    """The parent goes on to record."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            run(program, [1], [3])
            left = len(program.observer.calls.seen)
            type(program.agent)("child")
            program.observer.close()
            os._exit(left)
        os._exit(77)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    run(program, [2], [4])
    program.observer.flush()
    names = sorted(path.name.rsplit("-", 1)[0] for path in program.folder.glob("*.kvrec"))
    assert names == sorted([f"nixl-decode-{os.getpid()}", f"nixl-child-{pid}"])


def test_the_recording_of_an_agent_that_is_gone_is_complete(program: Program) -> None:
    """The file and the thread of its recorder are closed."""
    program.agent.transfer(program.make([1], [2], request="cmpl-1"))
    (agent,) = program.observer.calls.agents.values()
    del program.agent
    gc.collect()
    recording = program.recording()
    assert (len(recording.transfers), recording.complete) == (1, True)
    assert (program.observer.calls.agents, agent.recorder.ended) == ({}, True)


def test_an_object_that_outlives_the_observer_sends_no_message(program: Program) -> None:
    program.observer.close()
    del program.agent
    gc.collect()
    assert program.observer.calls.tokens.empty()


def test_all_recordings_are_closed_though_agents_end_meanwhile(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may still end agents if it was too slow for `close`."""
    other = type(program.agent)("other")
    calls = program.observer.calls
    first, second = (agent.recorder for agent in calls.agents.values())
    with monkeypatch.context() as patch:
        patch.setattr(first, "close", calls.agents.clear)
        program.observer.close()
    first.close()
    assert second.ended
    del other


def test_a_forked_child_keeps_no_agent_of_its_parent(program: Program) -> None:
    (agent,) = map(weakref.ref, program.observer.calls.agents.values())
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(agent() is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert agent() is not None


def test_calls_that_come_too_fast_are_a_finding(program: Program) -> None:
    """Calls of transfers that began before are left out; later transfers are recorded."""
    handle = program.make([1], [3])
    program.observer.flush()
    with program.observer.calls.mutex:  # so that the thread waits
        for _ in range(MAX_SEEN):
            program.agent.release_dlist_handle(handle)
        program.agent.transfer(handle)
        run(program, [2], [4])
        new = program.agent.prep_xfer_dlist("prefill", program.blocks(program.there))
    program.observer.flush()
    assert program.findings() == ["calls_lost"]
    (lost,) = [its for its in program.recording().events if its.operation == "warning"]
    assert lost.fields["count"] == 5  # two of them by `transfer`, which polls
    program.remote = new  # a list is not lost
    run(program, [2], [4])
    assert len(program.recording().transfers) == 1


@pytest.mark.parametrize(
    ("blocks", "layers"),
    [
        ([1, 4], LAYERS),
        ([4, 1, 6], LAYERS),
        ([*range(BLOCKS)], 1),  # the whole list
        ([3], 1),  # rows at one distance may be blocks
    ],
)
def test_layers_in_one_registration_are_told_apart_by_a_transfer(
    program: Program, blocks: list[int], layers: int
) -> None:
    """CPU tensors of vLLM are made so. The lists have all blocks of one layer after another."""
    memory, theirs = (np.zeros((LAYERS, BLOCKS * BLOCK), np.uint8) for _ in range(2))
    program.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")])
    program.agent.deregister_memory(program.registered)
    program.local = program.agent.prep_xfer_dlist("", program.blocks(memory))
    type(program.agent)("prefill")  # another agent does not know these lists
    program.remote = program.agent.prep_xfer_dlist("prefill", program.blocks(theirs))
    for _ in range(2):
        run(program, blocks, [7 - block for block in blocks])
    program.observer.flush()
    (path,) = program.folder.glob("nixl-decode-*.kvrec")
    for transfer in read(path).transfers:
        assert transfer.plan is not None
        part = transfer.plan.part
        assert (part.num_tensor_pairs, part.dst.num_tensors) == (layers, layers)
        assert part.dst.count == part.src.count == LAYERS * BLOCKS // layers


def regions_in_memory() -> int:
    gc.collect()
    return sum(isinstance(found, Regions) for found in gc.get_objects())


def test_released_lists_leave_nothing_behind(program: Program) -> None:
    """A program that makes and releases lists for hours must not grow."""
    handles = program.local, program.remote  # a handle is known by its id
    program.observer.flush()
    before = regions_in_memory()
    for first in (0, 1):
        lists = [
            program.agent.prep_xfer_dlist(name, program.blocks(memory))
            for name, memory in (("", program.here), ("prefill", program.there))
        ]
        program.local, program.remote = lists
        program.agent.release_xfer_handle(run(program, [1, 4], [7, 2]))
        program.observer.flush()
        assert regions_in_memory() == before + 2
        for handle in (lists[first], lists[not first]):
            program.agent.release_dlist_handle(handle)
        program.observer.flush()
        assert regions_in_memory() == before
    assert len(program.recording().transfers) == 2
    del handles


def test_the_number_of_known_pairs_of_lists_is_bounded(tmp_path: Path) -> None:
    blocks = regions_of(np.array([(4096, BLOCK)]), "", np.empty(0, np.int64), 0)
    tables = [Table(blocks, first, 1, b"", True) for first in range(math.isqrt(MAX_PAIRS) + 1)]
    with recorder(tmp_path / "a.kvrec") as writer:
        agent = Agent(writer)
        for src, dst in product(tables, tables):
            pair = agent._pair(True, src, dst)
            assert agent._pair(True, src, dst) is pair
            assert len(agent._pairs) <= MAX_PAIRS


def test_a_transfer_like_an_earlier_one_adds_only_its_rows(program: Program) -> None:
    """The program waits for the thread that would plan, so no plan is made."""
    sizes = []
    for blocks in ([1], [1, 2], [1, 2, 3, 4]):
        run(program, blocks, [7 - block for block in blocks])
        program.observer.flush()
        (path,) = program.folder.glob("*.kvrec")
        sizes.append(path.stat().st_size)
    two, four = np.diff(sizes)
    assert four - two == 2 * (8 + 8)  # two rows more, each a number here and one of the peer


def test_a_tensor_is_one_range() -> None:
    """NIXL accepts a tensor in place of a list of one."""
    tensor = types.SimpleNamespace(data_ptr=lambda: 4096, numel=lambda: 6, element_size=lambda: 2)
    for given in (tensor, [tensor]):
        ranges, names = ranges_of(given)
        assert (ranges.tolist(), names) == ([[4096, 12]], [""])


@pytest.mark.parametrize("sort", ["cpu", "cuda"])
@pytest.mark.parametrize("given", ["DRAM", "VRAM", None])
def test_tensors_are_host_memory_only_if_their_device_is_the_host(
    sort: str, given: str | None
) -> None:
    """Sums are read from host memory only; NIXL ignores `mem_type` if it is given tensors."""
    tensor = types.SimpleNamespace(
        data_ptr=lambda: 4096, numel=lambda: 4, element_size=lambda: 4,
        device=types.SimpleNamespace(type=sort),
    )  # fmt: skip
    is_host = surfaces._registered((None, [tensor], given), {}, None)[-1]
    assert is_host is (sort == "cpu")
