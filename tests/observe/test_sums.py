"""Sums of blocks at both ends: the first wrong block is named, and whose bytes it has."""

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
from tests.observe.test_nixl import BLOCK, Program

MINE, THEIRS = [1, 4], [7, 2]


class Pair(Program):
    """A program, and the owner of what it reads; both are observed with sums."""

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


def test_what_arrives_as_it_was_handed_over(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.hand_over()
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    assert "cmpl-7: transfer #" in (text := pair.sums(capsys, 0))
    assert "6 sums equal" in text


def test_a_stale_block(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """The owner wrote another request into it."""
    pair.hand_over()
    pair.there[1, 2 * BLOCK : 3 * BLOCK] ^= 1
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
    text = pair.sums(capsys, 1)
    assert "1 of 6 sums differ" in text
    assert "layer 1, run 1: block 2 > block 4: " in text
    assert text.endswith(" arrived: no bytes of this request")


def test_blocks_that_are_read_again(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """The owner has given them to others after the first transfer."""
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


def test_a_push_is_compared_with_what_its_receiver_found(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS), "WRITE")
    pair.here[:] = 0  # what the sender does with its memory later does not matter
    pair.there[0, 7 * BLOCK] ^= 1
    pair.hand_over()
    document = json.loads(pair.sums(capsys, 1, "--json", "--tag", "cmpl-7"))
    (transfer,) = document["transfers"]
    (wrong,) = transfer["wrong"]
    assert wrong["text"].startswith("layer 0, run 0: block 1 > block 7: ")


def test_a_tag_that_is_used_again(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Each transfer is compared with what was handed over last."""
    for _ in range(2):
        pair.hand_over()
        pair.move(Program.every_layer(MINE), Program.every_layer(THEIRS))
        pair.there[:] ^= 1
    assert pair.sums(capsys, 0).count("6 sums equal") == 2


def test_without_the_sums_of_the_owner(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.hand_over("cmpl-8")
    pair.move([1], [2])
    assert "nothing to compare with" in pair.sums(capsys, 0)
    pair.hand_over("cmpl-7")
    assert "1 sum here, and 6 in" in pair.sums(capsys, 1)


def test_memory_that_cannot_be_read_has_no_sums(pair: Pair) -> None:
    """Of a device, or not registered: as the address may be anything."""
    pair.observer.sum("cmpl-7", [(8, 1 << 40, 0)])
    pair.owner.deregister_memory([(its.ctypes.data, its.nbytes, 0, "") for its in pair.there])
    device = np.zeros(64, np.uint8)
    pair.owner.register_memory([(device.ctypes.data, 64, 0, "")], "VRAM")
    pair.observer.sum("cmpl-7", [(device.ctypes.data, 64, 0)])
    pair.hand_over()
    pair.observer.flush()
    assert pair.observer.calls.active
    for path in pair.folder.glob("*.kvrec"):
        assert [row for row in read(path).events if row.operation == "sums"] == []


def test_without_an_observer_nothing_happens(tmp_path: Path) -> None:
    """Or with one that records no sums."""
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
