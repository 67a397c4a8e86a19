"""Sums of blocks at both ends: they name the first wrong block, and the owner of its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvplan.observe
from kvplan.cli import main
from kvplan.recording import read
from tests.observe.program import BLOCK, Program

MINE, THEIRS = [1, 4], [7, 2]


class Pair(Program):
    """A program, and the owner of the memory that it reads, both observed with sums."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sums=True)
        self.owner = type(self.agent)("prefill")
        self.owner.register_memory(
            [(its.ctypes.data, its.nbytes, 0, "") for its in self.there], "DRAM"
        )

    def descriptors(self, memory: Any, blocks: list[int]) -> list[tuple[int, int, int]]:
        every = self.blocks(memory)
        return [every[index] for index in self.every_layer(blocks)]

    def hand_over(self, tag: str = "cmpl-7", blocks: list[int] = THEIRS) -> None:
        self.observer.sum(tag, self.descriptors(self.there, blocks))

    def move(self, here: list[int], there: list[int], op: str = "READ") -> None:
        """Move rows of the lists."""
        handle = self.agent.make_prepped_xfer(op, self.local, here, self.remote, there, b"cmpl-7:2")
        assert self.agent.transfer(handle) == "DONE"
        self.agent.release_xfer_handle(handle)

    def sums(self, capsys: pytest.CaptureFixture[str], code: int, *options: str) -> str:
        self.observer.flush()
        files = [str(next(self.folder.glob(f"nixl-{name}-*"))) for name in ("decode", "prefill")]
        assert main(["trace", *files, "--sums", *options]) == code
        return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.observer.close()


def test_correct_bytes_have_no_report(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.hand_over()
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    assert "cmpl-7: transfer #" in (text := pair.sums(capsys, 0))
    assert "6 sums equal" in text


def test_a_stale_block(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """The owner wrote another request into the block."""
    pair.hand_over()
    pair.there[1, 2 * BLOCK : 3 * BLOCK] ^= 1
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    text = pair.sums(capsys, 1)
    assert "1 of 6 sums differ" in text
    assert "layer 1, run 1: block 2 > block 4: " in text
    assert text.endswith(" arrived: no bytes of this request")


def test_a_block_that_another_request_has_taken_over(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block was freed too early and handed over again: the report names the other request."""
    pair.hand_over()
    pair.there[:, 2 * BLOCK : 3 * BLOCK] ^= 1
    pair.hand_over("cmpl-9", [6, 2])
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    text = pair.sums(capsys, 1, "--request", "cmpl-7")
    assert "3 of 6 sums differ" in text
    assert "no bytes of this request, but of another: sum 1 of cmpl-9, row " in text
    assert " s before the end" in text


def test_a_block_that_the_owner_has_read_another_request_into(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """A read of the owner itself has sums, too."""
    pair.hand_over()
    third = np.full(BLOCK, 9, np.uint8)
    block = pair.descriptors(pair.there, [2])[:1]
    handle = pair.owner.initialize_xfer(
        "READ", block, [(third.ctypes.data, BLOCK, 0)], "third", b"cmpl-9:1"
    )
    assert pair.owner.transfer(handle) == "DONE"
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    text = pair.sums(capsys, 1, "--request", "cmpl-7")
    assert "1 of 6 sums differ" in text
    assert "no bytes of this request, but of another: sum 0 of cmpl-9, row " in text


def test_two_ranks_hand_over_the_same_request(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each transfer is compared with the agent that it read from, not with the latest sums."""
    other = type(pair.agent)("rank-1")
    memory = np.zeros_like(pair.there)
    other.register_memory([(its.ctypes.data, its.nbytes, 0, "") for its in memory], "DRAM")
    pair.hand_over()
    pair.observer.sum("cmpl-7", pair.descriptors(memory, THEIRS))
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    pair.observer.flush()
    assert main(["trace", str(pair.folder), "--sums"]) == 0
    assert "6 sums equal" in capsys.readouterr().out


def test_a_name_of_a_peer_in_bytes(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Some versions of `add_remote_agent` return the name so."""
    pair.remote = pair.agent.prep_xfer_dlist(b"prefill", pair.blocks(pair.there))
    pair.hand_over()
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    assert "6 sums equal" in pair.sums(capsys, 0)


def test_the_owner_has_no_transfer_to_compare(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option that compares both ends."""
    pair.hand_over()
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    pair.observer.flush()
    files = [str(next(pair.folder.glob(f"nixl-{name}-*"))) for name in ("decode", "prefill")]
    assert main(["trace", *files, "--compare", "cmpl-7", "cmpl-7"]) == 2
    assert "it recorded their passive end: compare both ends with --sums" in (
        capsys.readouterr().err
    )
    assert main(["trace", files[0], "--compare", "cmpl-8", "cmpl-7"]) == 2
    assert "--sums" not in capsys.readouterr().err


def test_two_requests_in_a_folder_of_both_ends(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owner's recording has no transfer, and is left out."""
    for tag in ("cmpl-7", "cmpl-8"):
        handle = pair.make(MINE, THEIRS, request=tag)
        assert pair.agent.transfer(handle) == "DONE"
    pair.observer.flush()
    assert main(["trace", str(pair.folder), "--compare", "cmpl-7", "cmpl-8"]) == 0
    said = capsys.readouterr().out
    assert said.count("nixl-decode-") == 2
    assert "same runs in the same order" in said
    for tags in (("cmpl-7", "cmpl-9"), ("#1", "#2")):
        assert main(["trace", str(pair.folder), "--compare", *tags]) == 2


def test_the_number_of_the_cache_is_listed(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """The listing has the numbers that `--block` takes; another number is answered with it."""
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    pair.observer.flush()
    file = str(next(pair.folder.glob("nixl-decode-*")))
    assert main(["trace", file, "--operation", "pull"]) == 0
    title, head, row, _ = capsys.readouterr().out.splitlines()
    assert "(nixl decode)" in title
    end = head.index(" cache") + len(" cache")
    cache = row[:end].split()[-1]
    assert main(["trace", file, "--block", f"{cache}:4"]) == 0
    assert "1 transfer wrote block 4" in (found := capsys.readouterr().out)
    assert "caches that" not in found
    assert main(["trace", file, "--block", "77:4"]) == 0
    assert f"caches that its transfers wrote: {cache}\n" in capsys.readouterr().out


def test_blocks_that_are_read_again(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """The owner has given the blocks to others after the first transfer."""
    pair.hand_over()
    for here in (MINE, MINE[::-1]):
        pair.move(Program.every_layer(here), Program.every_layer(THEIRS))
        pair.there[:] ^= 1
    text = pair.sums(capsys, 1)
    (first,) = [its for its in text.split("cmpl-7: ") if "6 sums equal" in its]
    number = first.split()[1]
    assert f"transfer {number} had read the same blocks " in text
    assert text.endswith(" s before")
    assert text.count("the same blocks") == 1


def test_other_blocks_of_the_same_request(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.hand_over()
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    pair.move(Program.every_layer(MINE), Program.every_layer([THEIRS[0], 5]))
    assert "the same blocks" not in pair.sums(capsys, 1)


def test_a_swapped_block(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.hand_over()
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS[::-1]))
    text = pair.sums(capsys, 1)
    assert "6 of 6 sums differ" in text
    assert "layer 0, run 0: block 2 > block 1: " in text
    assert " arrived: the bytes of layer 0, run 1 layer 0, run 1: block 7 > block 4" in text
    assert text.endswith("the same in 2 more, up to layer 2")


def test_a_wrong_layer(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.hand_over()
    rows = Program.every_layer(THEIRS)
    pair.move(Program.every_layer(MINE), [*rows[2:], *rows[:2]])
    text = pair.sums(capsys, 1)
    assert "layer 0, run 0 from layer 1: block 7 > block 1: " in text
    assert " arrived: the bytes of layer 1, run 0" in text
    assert "the same in 1 more, up to layer 1 layer 2, run 0 from layer 0: " in text


def test_a_push_is_compared_with_the_sums_of_its_receiver(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS), "WRITE")
    pair.here[:] = 0  # later changes of the sender's memory do not matter
    pair.there[0, 7 * BLOCK] ^= 1
    pair.hand_over()
    document = json.loads(pair.sums(capsys, 1, "--json", "--tag", "cmpl-7"))
    (transfer,) = document["transfers"]
    (wrong,) = transfer["wrong"]
    assert wrong["text"].startswith("layer 0, run 0: block 1 > block 7: ")


def test_a_push_that_another_one_of_its_sender_has_overwritten(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other request is one of the sender's, whose memory had these bytes."""
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS), "WRITE")
    pair.observer.sum("cmpl-9", pair.descriptors(pair.here, [3]))
    pair.there[0, 7 * BLOCK : 8 * BLOCK] = pair.here[0, 3 * BLOCK : 4 * BLOCK]
    pair.hand_over()
    text = pair.sums(capsys, 1, "--request", "cmpl-7")
    assert "1 of 6 sums differ" in text
    assert "no bytes of this request, but of another: sum 0 of cmpl-9, row " in text


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_a_tag_that_is_used_again(pair: Pair, capsys: pytest.CaptureFixture[str], op: str) -> None:
    """A pull is compared with the latest hand-over, a push with the sums of its receiver."""
    for _ in range(3):
        if op == "READ":
            pair.hand_over()
        pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS), op)
        if op == "WRITE":
            pair.hand_over()
        for memory in (pair.here, pair.there):
            memory[:] ^= 1
    assert pair.sums(capsys, 0).count("6 sums equal") == 3


def test_a_push_without_sums_has_not_those_of_an_earlier_one(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory that is not registered has no sums."""
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS), "WRITE")
    pair.hand_over()
    pair.agent.deregister_memory(pair.registered)
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS), "WRITE")
    assert pair.sums(capsys, 0).count("transfer #") == 1


def test_without_the_sums_of_the_owner(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.hand_over("cmpl-8")
    pair.move([1], [2])
    assert "nothing to compare with" in pair.sums(capsys, 0)
    pair.hand_over("cmpl-7")
    assert "1 sum here, and 6 in" in pair.sums(capsys, 1)
    assert main(["trace", str(pair.folder), "--sums", "--request", "cmpl-9"]) == 2
    assert "--sums: no transfer of cmpl-9 has sums\n" in capsys.readouterr().err


def test_memory_that_cannot_be_read_has_no_sums(pair: Pair) -> None:
    """Memory of a device, or memory that is not registered, may have any address."""
    pair.observer.sum("cmpl-7", [(8, 1 << 40, 0)])
    pair.observer.sum("cmpl-7", [])
    pair.owner.deregister_memory([(its.ctypes.data, its.nbytes, 0, "") for its in pair.there])
    device = np.zeros(64, np.uint8)
    pair.owner.register_memory([(device.ctypes.data, 64, 0, "")], "VRAM")
    pair.observer.sum("cmpl-7", [(device.ctypes.data, 64, 0)])
    pair.hand_over()
    pair.observer.flush()
    assert pair.observer.calls.seen.active
    for path in pair.folder.glob("*.kvrec"):
        assert [row for row in read(path).events if row.operation == "sums"] == []


def test_without_an_observer_no_sums_are_recorded(tmp_path: Path) -> None:
    """The same holds for an observer that records no sums."""
    program = Program(tmp_path)
    kvplan.observe.sums("cmpl-7", [(8, 1 << 40, 0)])
    program.observer.sum("cmpl-7", [(program.here.ctypes.data, 8, 0)])
    assert [row for row in program.recording().events if row.operation == "sums"] == []
    program.observer.close()


def test_recordings_without_sums_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(tmp_path)
    program.agent.transfer(program.make([1], [2]))
    program.observer.sum("cmpl-7", [(program.here.ctypes.data, 8, 0)])
    program.observer.close()
    assert main(["trace", str(tmp_path), "--sums"]) == 2
    assert "KVPLAN_OBSERVE=nixl,sums" in capsys.readouterr().err
