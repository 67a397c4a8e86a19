"""A lease as a value: its bytes and fields, and refusals of forged leases."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import FrozenInstanceError, replace
from pickle import dumps, loads
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import BlockLease, LLMException
from kvplan.lease import LeaseWord, _digest
from kvplan.planning.blocks import RequestBlocks
from tests.engine.caches import LEASE
from tests.support.refusals import refused

tags = st.text(st.characters(categories=("L", "N", "P", "Zs"), include_characters=" "), max_size=64)


@given(
    st.builds(
        BlockLease,
        cluster_id=st.integers(0, 2**64 - 1),
        instance=st.binary(min_size=16, max_size=16),
        cache_id=st.integers(0, 2**63 - 1),
        lease_id=st.integers(0, 2**64 - 1),
        blocks=st.lists(st.integers(0, 2**63 - 1), max_size=9).map(tuple),
        paged=st.just(True),
        tag=tags.filter(str.isprintable),
        words=st.lists(
            st.builds(
                LeaseWord,
                st.sampled_from(["local", "tcp"]),
                st.integers(0, 2**32 - 1),
                st.integers(0, 2**64 - 1),
            ),
            max_size=4,
            unique_by=lambda link: link.transport,
        ).map(tuple),
    )
)
def test_written_bytes_are_read_back(lease: BlockLease) -> None:
    assert BlockLease.from_bytes(lease.to_bytes()) == lease


@pytest.mark.parametrize("largest", [0, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**63 - 1])
def test_a_lease_is_a_value(largest: int) -> None:
    words = LeaseWord("tcp", 2**32 - 1, 2**64 - 1), LeaseWord("local", 0, 0)
    lease = replace(LEASE, blocks=(3, largest), words=words, tokens=5)
    assert (lease.blocks, lease.words) == ((3, largest), words)
    for copied in (copy(lease), deepcopy(lease), loads(dumps(lease)), replace(lease)):
        assert copied == lease
        assert hash(copied) == hash(lease)
        assert repr(copied) == repr(lease)
    assert {lease, replace(lease, tokens=None), replace(lease, blocks=(largest, 3))} - {lease}
    with pytest.raises(FrozenInstanceError):
        lease.tag = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        lease.other = 1  # type: ignore[attr-defined]


def test_words_by_transport() -> None:
    words = LeaseWord("tcp", 5, 7), LeaseWord("local", 70_000, 9)
    lease = replace(LEASE, words=words)
    assert [lease.word(name) for name in ("local", "tcp", "ucx")] == [*words[::-1], None]
    assert lease.packed_word("local") == np.array([70_000, 9], np.uint64).tobytes()
    assert lease.packed_word("ucx") is None
    assert lease.places() == [("tcp", (5, 7)), ("local", (70_000, 9))]


class Tensor:
    """A host tensor, as torch's: each element is a tensor, and is hashed as an object."""

    def __init__(self, values: object) -> None:
        self._values = np.asarray(values)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        return self._values

    def __index__(self) -> int:
        return int(self._values)

    def __iter__(self) -> Iterator[Tensor]:
        return map(Tensor, self._values)


def test_blocks_may_be_named_by_tensors() -> None:
    given: Any
    for given in (Tensor([2, 5]), [Tensor(2), Tensor(5)]):
        assert LEASE.named("src_blocks", given) == [2, 5]
        moved = replace(LEASE, blocks=(5, 3, 900), moves=1)
        assert moved.places_of("src_blocks", LEASE, given) == [3, 5]
    with refused("LLM_PARAM_INVALID", r"src_blocks\[1\]=3 is not a block of lease 17"):
        LEASE.named("src_blocks", cast(Any, Tensor([5, 3])))
    for given in (np.array([[5], [2]]), [[5]], Tensor([[5]])):
        with pytest.raises(TypeError, match="src_blocks must be "):
            LEASE.named("src_blocks", given)


def test_named_blocks_are_checked() -> None:
    assert LEASE.named("src_blocks", None) == (5, 2, 900)
    for table in ([2], (900, 5), np.array([2, 5]), []):
        named = LEASE.named("src_blocks", table)
        assert named == [*table]
        assert named is not table  # another thread may change the table after the check
    assert type(LEASE.named("src_blocks", RequestBlocks((2, 5)))) is RequestBlocks
    for wrong in ([5, 3], np.array([5, 3])):
        with refused("LLM_PARAM_INVALID", r"src_blocks\[1\]=.*3.* is not a block of lease 17"):
            LEASE.named("src_blocks", wrong)
    with pytest.raises(TypeError, match="src_blocks must be a sequence of int, not int"):
        LEASE.named("src_blocks", 5)  # type: ignore[arg-type]


def test_an_encoded_lease_is_small() -> None:
    words = tuple(LeaseWord(name, 2**24, 2**63) for name in ("local", "tcp", "ucx", "hccl"))
    largest = replace(
        LEASE, cluster_id=2**64 - 1, lease_id=2**63, tag="x" * 64, words=words, blocks=()
    )
    assert len(largest.to_bytes()) < 200
    assert len(replace(LEASE, blocks=tuple(range(10_000))).to_bytes()) < 30_200


def test_a_cut_or_changed_lease_is_refused() -> None:
    whole = LEASE.to_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with refused("LLM_PARAM_INVALID", "blob"):
            BlockLease.from_bytes(bytes(changed))
    for length in range(len(whole)):
        with refused("LLM_PARAM_INVALID", "blob"):
            BlockLease.from_bytes(whole[:length])
    with refused("LLM_PARAM_INVALID", "blob"):
        BlockLease.from_bytes(whole + b"\0")
    with pytest.raises(TypeError):
        BlockLease.from_bytes("lease")  # type: ignore[arg-type]


@given(st.binary(max_size=80))
def test_a_forged_lease_is_refused(body: bytes) -> None:
    """Any body may follow a valid digest."""
    with refused("LLM_PARAM_INVALID", "not a lease"):
        BlockLease.from_bytes(_digest(body) + body)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("tag", "x" * 65, LLMException),
        ("tag", "a\nb", LLMException),
        ("tag", 5, TypeError),
        ("paged", 1, TypeError),
        ("paged", False, LLMException),  # three slots
        ("instance", b"short", LLMException),
        ("blocks", (1, True), TypeError),
        ("blocks", [1], TypeError),
        ("cluster_id", -1, ValueError),
        ("words", (("local", 1, 1),), TypeError),
        ("blocks", (1, -1), LLMException),
        ("blocks", (2**63,), LLMException),
        ("words", (LeaseWord("local", 1, 1), LeaseWord("local", 2, 1)), LLMException),
        ("words", (LeaseWord("x" * 33, 1, 1),), LLMException),
        ("words", (LeaseWord(5, 1, 1),), TypeError),  # type: ignore[arg-type]
        ("words", (LeaseWord("local", -1, 1),), ValueError),
        ("words", (LeaseWord("local", 1, 2**64),), ValueError),
    ],
)
def test_impossible_fields_are_refused(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        replace(LEASE, **{field: value})
