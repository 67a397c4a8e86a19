"""What a call came to, held against what is in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvplan import LLMException, LLMStatusCode
from tests.faults.contents import DESC, Tensor

COUNT = DESC.num_tensors  # descriptors of a slot


def refused(
    call: Callable[[], object], status: LLMStatusCode, match: str | None = None
) -> LLMException:
    """The error of a call that must fail with `status`."""
    with pytest.raises(LLMException, match=match) as caught:
        call()
    assert caught.value.status_code is status, caught.value
    return caught.value


def unconfirmed(error: LLMException) -> set[int]:
    """The descriptors that it does not vouch for."""
    return {it for first, last in error.unconfirmed for it in range(first, last)}


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
