"""Outcomes of calls, compared with the contents of memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvplan import LLMException
from tests.faults.contents import DESC, Tensor

COUNT = DESC.num_tensors  # descriptors of a slot


def unconfirmed(error: LLMException) -> set[int]:
    """Return the descriptors that the error does not confirm."""
    return {index for first, last in error.unconfirmed for index in range(first, last)}


def assert_confirmed(
    error: LLMException | None, dst: Sequence[Tensor], src: Sequence[Tensor], slot: int = 0
) -> None:
    """Check that the confirmed descriptors of a slot have arrived, and no other slot changed."""
    missing = set() if error is None else unconfirmed(error)
    for number, (destination, source) in enumerate(zip(dst, src, strict=True)):
        if number not in missing:
            assert (destination[slot] == source[slot]).all(), f"descriptor {number} is confirmed"
        other_rows = [row for row in range(len(destination)) if row != slot]
        assert not destination[other_rows].any()
