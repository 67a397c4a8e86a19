"""A program on NIXL, observed: records and findings, and an unchanged program."""

from __future__ import annotations

import gc
import math
import os
import types
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplan.observe import Observer, surfaces
from kvplan.observe.agent import Agent
from kvplan.observe.calls import MAX_SEEN
from kvplan.observe.observer import peer_number
from kvplan.observe.plans import Regions, regions_of
from kvplan.observe.surfaces import wrap_nixl
from kvplan.observe.transfers import Table
from kvplan.recording import Recording, read, who_wrote
from tests.observe import fake_nixl
from tests.recording.operations import recorder

BLOCK, BLOCKS, LAYERS = 64, 8, 3
MAX_PAIRS = 4096


class Program:
    """A program with two layers: memory of this process and of a peer, and an agent."""

    def __init__(self, folder: Path, *, sums: bool = False) -> None:
        self.module = types.ModuleType("nixl._api")
        agent = type("nixl_agent", (), dict(vars(fake_nixl.nixl_agent)))
        self.module.nixl_agent = agent  # type: ignore[attr-defined] # of this program alone
        self.observer = Observer(folder, sums=sums)
        self.folder = folder
        wrap_nixl(self.module, self.observer)
        self.agent: Any = agent("decode")
        numbers = np.random.default_rng(3)
        shape = (LAYERS, 2 * BLOCKS * BLOCK)
        self.here, self.there = (numbers.integers(0, 256, shape, np.uint8) for _ in range(2))
        self.registered = [
            (its.ctypes.data, BLOCKS * BLOCK, 0, f"layer.{i}") for i, its in enumerate(self.here)
        ]
        self.agent.register_memory(self.registered, "DRAM")
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.blocks(self.here))
        self.remote = self.agent.prep_xfer_dlist("prefill", self.blocks(self.there))

    @staticmethod
    def blocks(memory: Any) -> list[tuple[int, int, int]]:
        return [
            (layer.ctypes.data + block * BLOCK, BLOCK, 0)
            for layer in memory
            for block in range(BLOCKS)
        ]

    @staticmethod
    def every_layer(blocks: list[int]) -> list[int]:
        return [layer * BLOCKS + block for layer in range(LAYERS) for block in blocks]

    def make(self, here: list[int], there: list[int], op: str = "READ", request: str = "") -> Any:
        return self.agent.make_prepped_xfer(
            op, self.local, self.every_layer(here), self.remote, self.every_layer(there),
            f"{request}:2".encode() if request else b"",
        )  # fmt: skip

    def recording(self) -> Recording:
        self.observer.flush()
        (path,) = self.folder.glob("*.kvrec")
        return read(path)

    def findings(self) -> list[str]:
        rows = self.recording().events
        return [str(row.fields["finding"]) for row in rows if row.operation == "warning"]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    made.observer.close()


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
    for _ in range(2):
        handle = program.agent.make_prepped_xfer(op, program.local, here, program.remote, there)
        program.agent.transfer(handle)
    transfers = program.recording().transfers
    read, written = (there, here) if op == "READ" else (here, there)
    for transfer in transfers:
        assert transfer.plan is not None
        moved = set()
        for part in transfer.plan.parts:
            for src, dst in zip(part.src_tensors, part.dst_tensors, strict=True):
                for src_offset, dst_offset, nbytes in part.segments.expanded():
                    assert nbytes == BLOCK
                    rows = src_offset // BLOCK, dst_offset // BLOCK
                    moved.add((src * BLOCKS + rows[0], dst * BLOCKS + rows[1]))
        assert moved == set(zip(read, written, strict=True))
        assert transfer.nbytes == len(here) * BLOCK
    assert len(transfers) == 2
    assert transfers[0].plan == transfers[1].plan


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


def run(program: Program, here: list[int], there: list[int], op: str = "READ") -> Any:
    handle = program.make(here, there, op)
    program.agent.transfer(handle)
    return handle


class TestFindings:
    def test_a_correct_program_has_no_findings(self, program: Program) -> None:
        type(program.agent).polls = 1
        first, second = run(program, [1, 2], [3, 4]), run(program, [3], [5])
        third = run(program, [5], [6], "WRITE")
        for handle in (first, second, third):
            assert program.agent.check_xfer_state(handle) == "DONE"
            program.agent.release_xfer_handle(handle)
        program.agent.send_notif("prefill", b"cmpl-7:2")
        program.agent.deregister_memory(program.registered)
        assert program.findings() == []
        assert len(program.recording().transfers) == 3

    @pytest.mark.parametrize("op", ["READ", "WRITE"])
    @pytest.mark.parametrize("order", [[4, 5], [5, 4], [3, 5, 4]])
    def test_neighbouring_ranges_are_not_findings(
        self, program: Program, op: str, order: list[int]
    ) -> None:
        type(program.agent).polls = 1
        for block in order:
            run(program, [block], [block], op)
        assert program.findings() == []

    def test_equal_addresses_at_two_peers_are_not_findings(self, program: Program) -> None:
        """Two processes may have their memory at one address."""
        type(program.agent).polls = 1
        first = run(program, [1], [4], "WRITE")
        here = program.remote
        program.remote = program.agent.prep_xfer_dlist("other", program.blocks(program.there))
        run(program, [2], [4], "WRITE")
        assert program.findings() == []
        program.remote = here
        program.agent.check_xfer_state(first)
        run(program, [3], [4], "WRITE")
        assert program.findings() == []

    def test_ranges_outside_of_registrations(self, program: Program) -> None:
        beyond = int(program.here.ctypes.data) + BLOCKS * BLOCK
        theirs = int(program.there.ctypes.data)
        handle = program.agent.initialize_xfer(
            "READ", [(beyond, 8, 0)], [(theirs, 8, 0)], "prefill"
        )
        program.agent.transfer(handle)
        assert program.findings() == ["outside_registration"]

    def test_a_range_that_is_partly_outside_is_named_whole(self, program: Program) -> None:
        last = int(program.here.ctypes.data) + BLOCKS * BLOCK - 4
        theirs = int(program.there.ctypes.data)
        handle = program.agent.initialize_xfer("READ", [(last, 8, 0)], [(theirs, 8, 0)], "prefill")
        program.agent.transfer(handle)
        (row,) = (row for row in program.recording().events if row.operation == "warning")
        assert f"[{last:#x}, {last + 8:#x}) is not inside of one registration" in row.error

    @pytest.mark.parametrize("ops", [*product(("READ", "WRITE"), repeat=2)])
    def test_two_transfers_in_flight_are_compared(
        self, tmp_path: Path, ops: tuple[str, str]
    ) -> None:
        """Transfers write here, or at one of two peers with equal addresses."""
        for number, (peer, here, there) in enumerate(product(("prefill", "other"), (1, 2), (4, 5))):
            second = Program(tmp_path / str(number))
            type(second.agent).polls = 1
            run(second, [1], [4], ops[0])
            second.remote = second.agent.prep_xfer_dlist(peer, second.blocks(second.there))
            run(second, [here], [there], ops[1])
            same = (here == 1, peer == "prefill" and there == 4)[ops == ("WRITE", "WRITE")]
            finding = "two_writers" if ops[0] == ops[1] else "rewritten_source"
            assert second.findings() == [finding] * same, (peer, here, there)
            second.observer.close()

    def test_one_transfer_that_writes_a_block_twice(self, program: Program) -> None:
        run(program, [1, 1], [3, 4])
        assert program.findings() == ["written_twice"]
        assert [its.plan for its in program.recording().transfers] == [None]

    def test_a_release_before_the_end(self, program: Program) -> None:
        type(program.agent).polls = 1
        program.agent.release_xfer_handle(run(program, [1], [3]))
        assert program.findings() == ["released_before_done"]
        assert [its.failed for its in program.recording().transfers] == [True]

    def test_memory_is_registered_as_often_as_it_was_and_no_longer(self, program: Program) -> None:
        program.agent.register_memory(program.registered[:1], "DRAM")
        for found in ([], ["outside_registration"]):
            program.agent.deregister_memory(program.registered[:1])
            run(program, [1], [4])
            assert program.findings() == found

    def test_memory_that_is_deregistered_in_flight(self, program: Program) -> None:
        type(program.agent).polls = 1
        handle = run(program, [1], [3])
        program.agent.deregister_memory(program.registered[:1])
        assert program.agent.check_xfer_state(handle) == "DONE"
        assert program.findings() == ["deregistered_in_flight", "success_after_deregistration"]

    @pytest.mark.parametrize(
        ("rows", "found"),
        [
            ([0, 1, 8, 9, 16], ["uncovered_tail"]),
            ([0, 1, 8, 9], []),  # the other layer comes in a transfer of its own
            ([1, 8, 9], []),
        ],
    )
    def test_a_layer_without_the_last_block(
        self, program: Program, rows: list[int], found: list[str]
    ) -> None:
        handle = program.agent.make_prepped_xfer(
            "READ", program.local, rows, program.remote, rows, b"cmpl-7"
        )
        program.agent.transfer(handle)
        assert program.findings() == found
        if found:
            (warning,) = [its for its in program.recording().events if its.operation == "warning"]
            assert warning.error.endswith("layer 2 of local gets 1 block, and layer 0 2 blocks")

    def test_a_notification_before_the_bytes(self, program: Program) -> None:
        type(program.agent).polls = 1
        handle = program.make([1], [3], "WRITE", request="cmpl-7")
        program.agent.transfer(handle)
        program.agent.send_notif("prefill", b"cmpl-8:2")
        assert program.findings() == []
        program.agent.send_notif("prefill", b"cmpl-7:2")
        assert program.findings() == ["notified_before_bytes"]

    def test_a_transfer_that_is_posted_again_after_its_memory_was_registered_again(
        self, program: Program
    ) -> None:
        type(program.agent).polls = 1
        handle = run(program, [1], [3])
        program.agent.deregister_memory(program.registered[:1])
        assert program.agent.check_xfer_state(handle) == "DONE"
        before = program.findings()
        program.agent.register_memory(program.registered[:1], "DRAM")
        program.agent.transfer(handle)
        assert program.agent.check_xfer_state(handle) == "DONE"
        assert program.findings() == before


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
