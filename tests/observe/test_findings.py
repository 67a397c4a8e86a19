"""Findings: mistakes of an observed program, such as two writers of a block."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.observe.program import BLOCK, BLOCKS, Program, program, run

__all__ = ["program"]


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

    @pytest.mark.parametrize(
        ("op", "here", "there"), [("READ", [1, 1], [3, 4]), ("WRITE", [1, 2], [3, 3])]
    )
    def test_one_transfer_that_writes_a_block_twice(
        self, program: Program, op: str, here: list[int], there: list[int]
    ) -> None:
        run(program, here, there, op)
        assert program.findings() == ["written_twice"]
        assert [its.plan for its in program.recording().transfers] == [None]

    @pytest.mark.parametrize(
        ("op", "here", "there"), [("READ", [1, 2], [3, 3]), ("WRITE", [1, 1], [3, 4])]
    )
    def test_one_transfer_may_read_a_block_twice(
        self, program: Program, op: str, here: list[int], there: list[int]
    ) -> None:
        run(program, here, there, op)
        assert program.findings() == []
        assert [its.nbytes for its in program.recording().transfers] == [6 * BLOCK]

    def test_each_agent_logs_the_first_finding_of_a_kind(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("one", "other"):
            program = Program(tmp_path / name)
            for _ in range(2):
                run(program, [1, 1], [3, 4])
            program.observer.close()
        logged = [its.message for its in caplog.records if "written_twice" in its.message]
        found = [str(tmp_path / name) in text for name in ("one", "other") for text in logged]
        assert found == [True, False, False, True]

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
        program.agent.send_notif("another peer", b"cmpl-7:2")
        assert program.findings() == []
        program.agent.send_notif("prefill", b"cmpl-7:2")
        assert program.findings() == ["notified_before_bytes"]

    def test_a_notification_without_a_request_is_about_no_transfer(self, program: Program) -> None:
        type(program.agent).polls = 1
        program.agent.transfer(program.make([1], [3], "WRITE", request=""))
        program.agent.send_notif("prefill", b"")
        assert program.findings() == []

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
