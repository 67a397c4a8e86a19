"""A program on NIXL, observed: what it did is recorded, what is wrong is found, nothing changes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplan.observe import Observer
from kvplan.observe.observer import peer_number
from kvplan.observe.surfaces import wrap_nixl
from kvplan.recording import Recording, read, who_wrote
from tests.observe import fake_nixl

BLOCK, BLOCKS, LAYERS = 64, 8, 3


class Program:
    """Two layers' worth of a program: memory of this process and of a peer, and an agent."""

    def __init__(self, folder: Path) -> None:
        self.module = types.ModuleType("nixl._api")
        agent = type("nixl_agent", (), dict(vars(fake_nixl.nixl_agent)))
        self.module.nixl_agent = agent  # type: ignore[attr-defined] # of this program alone
        self.observer = Observer(folder)
        self.folder = folder
        wrap_nixl(self.module, self.observer)
        self.agent: Any = agent("decode")
        numbers = np.random.default_rng(3)
        shape = (LAYERS, 2 * BLOCKS * BLOCK)
        self.here, self.there = (numbers.integers(0, 256, shape, np.uint8) for _ in range(2))
        self.registered = [
            (its.ctypes.data, BLOCKS * BLOCK, 0, f"layer.{i}") for i, its in enumerate(self.here)
        ]
        self.agent.register_memory(self.registered)
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


def test_the_plan_is_what_was_carried_out(program: Program) -> None:
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


def test_results_and_exceptions_are_the_programs_own(program: Program) -> None:
    with pytest.raises(ValueError, match="indices differ in length"):
        program.agent.make_prepped_xfer("READ", program.local, [1], program.remote, [1, 2])
    assert program.agent.register_memory([(1, 2, 0, "")]) == [(1, 2, 0, "")]
    assert type(program.agent).transfer.__name__ == "transfer"


def test_an_observer_that_fails_says_so_once_and_steps_aside(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    handle = program.make([1], [2])
    program.agent.make_prepped_xfer("READ", program.local, [1], program.remote, [2], 5)
    program.observer.flush()  # a message that is no bytes
    assert not program.observer.active
    assert program.agent.transfer(handle) == "DONE"
    said = [its.message for its in caplog.records if "observing has ended" in its.message]
    assert len(said) == 1


def test_tensors_that_touch_in_memory_are_told_apart(program: Program) -> None:
    """Here by registrations, of the peer by the number of tensors here."""
    memory, theirs = (np.zeros((LAYERS, BLOCKS * BLOCK), np.uint8) for _ in range(2))
    program.agent.register_memory([(its.ctypes.data, BLOCKS * BLOCK, 0, "") for its in memory])
    program.local = program.agent.prep_xfer_dlist("", program.blocks(memory))
    program.remote = program.agent.prep_xfer_dlist("prefill", program.blocks(theirs))
    run(program, [1, 4], [7, 2])
    (transfer,) = program.recording().transfers
    assert transfer.plan is not None
    part = transfer.plan.part
    assert (part.src.num_tensors, part.src.count, part.num_tensor_pairs) == (LAYERS, BLOCKS, LAYERS)


def run(program: Program, here: list[int], there: list[int], op: str = "READ") -> Any:
    handle = program.make(here, there, op)
    program.agent.transfer(handle)
    return handle


class TestFindings:
    def test_none_of_a_program_that_is_right(self, program: Program) -> None:
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
    def test_none_of_neighbours(self, program: Program, op: str, order: list[int]) -> None:
        type(program.agent).polls = 1
        for block in order:
            run(program, [block], [block], op)
        assert program.findings() == []

    def test_none_of_equal_addresses_at_two_peers(self, program: Program) -> None:
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

    def test_two_transfers_that_write_the_same_bytes(self, program: Program) -> None:
        type(program.agent).polls = 1
        run(program, [1, 2], [3, 4])
        run(program, [2], [5])
        assert program.findings() == ["two_writers"]

    def test_two_writers_of_one_peer(self, program: Program) -> None:
        type(program.agent).polls = 1
        run(program, [1], [4], "WRITE")
        run(program, [2], [4], "WRITE")
        assert program.findings() == ["two_writers"]

    def test_one_transfer_that_writes_a_block_twice(self, program: Program) -> None:
        run(program, [1, 1], [3, 4])
        assert program.findings() == ["written_twice"]
        assert [its.plan for its in program.recording().transfers] == [None]

    def test_a_release_before_the_end(self, program: Program) -> None:
        type(program.agent).polls = 1
        program.agent.release_xfer_handle(run(program, [1], [3]))
        assert program.findings() == ["released_before_done"]
        assert [its.failed for its in program.recording().transfers] == [True]

    def test_memory_that_is_deregistered_in_flight(self, program: Program) -> None:
        type(program.agent).polls = 1
        handle = run(program, [1], [3])
        program.agent.deregister_memory(program.registered[:1])
        assert program.agent.check_xfer_state(handle) == "DONE"
        assert program.findings() == ["deregistered_in_flight", "success_after_deregistration"]

    def test_a_block_that_is_rewritten_while_it_is_read(self, program: Program) -> None:
        type(program.agent).polls = 1
        run(program, [1], [3], "WRITE")
        run(program, [1], [5])
        assert program.findings() == ["rewritten_source"]

    def test_a_notification_before_the_bytes(self, program: Program) -> None:
        type(program.agent).polls = 1
        handle = program.make([1], [3], "WRITE", request="cmpl-7")
        program.agent.transfer(handle)
        program.agent.send_notif("prefill", b"cmpl-8:2")
        assert program.findings() == []
        program.agent.send_notif("prefill", b"cmpl-7:2")
        assert program.findings() == ["notified_before_bytes"]
