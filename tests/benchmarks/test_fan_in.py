"""The checks of the benchmark of many peers at once, with few. Each peer is a process."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fan_in import FanIn, Result, measure, table
from benchmarks.fan_in_decode import Outcome
from benchmarks.filled_peer import Shape, check_blocks, mark

SMALL = Shape(tensors=4, blocks=16, block_nbytes=4 << 10)


def test_four_peers_are_pulled_from_at_once() -> None:
    result = measure(FanIn(4, SMALL, "local", bursts=2, sustained_s=0.2))
    decode = result.decode
    assert [len(times) for times in decode.finished_s] == [4, 4]
    assert len(decode.pulled) == 4
    assert min(decode.pulled) > 0
    assert result.faults() == []
    assert any("4 processes" in line for line in table(result))


def test_unexpected_results_are_reported() -> None:
    run = FanIn(2, SMALL, "local", bursts=1, sustained_s=1)
    pulled, kib = [100, 300], [0, 0, 0, 20_000]
    result = Result(run, Outcome(pulled=pulled, anonymous_kib=kib), peer_kib=[0, 5000])
    assert result.faults() == [
        "shares of 0.33, at least 0.5 was expected",
        "10000 KiB for each link, at most 1024 may be",
        "a peer gained 5000 KiB, at most 1024 may be",
    ]


def test_one_wrong_byte_is_found() -> None:
    source, target = np.array([3, 1]), np.array([0, 2])
    tensors = np.zeros((2, 4, 64), np.uint8)
    for number, tensor in enumerate(tensors):
        tensor.view(np.uint64)[target] = mark(7, number, source)[:, None]
    check_blocks(list(tensors), 7, source, target)
    tensors[1, 2, 40] ^= 1
    with pytest.raises(AssertionError, match="cluster 7 tensor 1 block 1 -> 2: not the peer"):
        check_blocks(list(tensors), 7, source, target)
