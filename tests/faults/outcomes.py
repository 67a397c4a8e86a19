"""What a call came to, held against what is in memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvplan import LLMException
from tests.faults.contents import DESC, Tensor

COUNT = DESC.num_tensors  # descriptors of a slot


def unconfirmed(error: LLMException) -> set[int]:
    """The descriptors that it does not vouch for."""
    return {index for first, last in error.unconfirmed for index in range(first, last)}


def assert_confirmed(
    error: LLMException | None, dst: Sequence[Tensor], src: Sequence[Tensor], slot: int = 0
) -> None:
    """What is confirmed of a whole slot has arrived; no other slot was touched."""
    missing = set() if error is None else unconfirmed(error)
    for number, (to, from_) in enumerate(zip(dst, src, strict=True)):
        if number not in missing:
            assert (to[slot] == from_[slot]).all(), f"descriptor {number} is confirmed"
        others = [row for row in range(len(to)) if row != slot]
        assert not to[others].any()
