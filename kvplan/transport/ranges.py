"""In which of a peer's registered ranges its tensors lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from kvplan.status import LLMException, LLMStatusCode, invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Column = NDArray[np.uint64]

_SHOWN_RANGES = 8


class RegisteredRange(Protocol):
    """Memory [address, address + nbytes) of a peer.

    Attributes:
        address: of the first byte, in the peer.
        nbytes: its size in bytes.
        writable: whether it may be written to.
        arena: what it is a part of, which is taken where there is a choice; None: nothing.
    """

    @property
    def address(self) -> int:
        """See above."""

    @property
    def nbytes(self) -> int:
        """See above."""

    @property
    def writable(self) -> bool:
        """See above."""

    @property
    def arena(self) -> object | None:
        """See above."""


_Range = TypeVar("_Range", bound=RegisteredRange)


class RangeTable(Generic[_Range]):
    """What `peer` has registered, sorted so that a tensor's range is found by bisection."""

    def __init__(self, peer: int | str, ranges: Sequence[_Range]) -> None:
        self._peer = peer
        # Of ranges that begin together the last is looked at first: an arena's, writable, shortest.
        self._ranges = sorted(
            ranges, key=lambda it: (it.address, it.arena is not None, it.writable, -it.nbytes)
        )
        self._firsts = np.array([it.address for it in self._ranges], dtype=np.uint64)
        # Last bytes, not ends: a range may end at 2**64.
        self._lasts = np.array([it.address + it.nbytes - 1 for it in self._ranges], dtype=np.uint64)
        self._writable = np.array([it.writable for it in self._ranges], dtype=np.bool_)
        self._in_arena = np.array([it.arena is not None for it in self._ranges], dtype=np.bool_)

    def locate(
        self, starts: Column, sizes: Column, *, writable: bool
    ) -> tuple[list[_Range], NDArray[np.intp]]:
        """The ranges that hold the tensors, each once, and which of them holds each tensor.

        An arena is taken where there is a choice.

        Raises:
            LLMException: LLM_KV_CACHE_NOT_EXIST: a tensor does not lie inside one range;
                LLM_PARAM_INVALID: a bad size, or a range that must not be written.
        """
        lasts = starts + (sizes - np.uint64(1))
        bad = np.flatnonzero((sizes < 1) | (lasts < starts))
        if bad.size:
            i = int(bad[0])
            raise invalid(
                f"tensor {i} has address {int(starts[i]):#x} and nbytes {sizes[i]}; nbytes must be "
                "at least 1, and end by 2**64"
            )
        found = np.searchsorted(self._firsts, starts, side="right") - 1
        sure = found >= 0
        near = found[sure]
        sure[sure] = (
            (lasts[sure] <= self._lasts[near])
            & (self._writable[near] if writable else True)
            & (self._in_arena[near] | (not self._in_arena.any()))
        )
        for i in np.flatnonzero(~sure).tolist():  # ranges that overlap, or a refusal
            found[i] = self._search(i, int(starts[i]), int(sizes[i]), writable=writable)
        used = sorted(set(found.tolist()))
        return [self._ranges[k] for k in used], np.searchsorted(used, found)

    def _search(self, i: int, start: int, size: int, *, writable: bool) -> int:
        """As `locate`, for tensor `i` and by looking at every range."""
        inside = np.flatnonzero((self._firsts <= start) & (start + size - 1 <= self._lasts))
        if not inside.size:
            raise LLMException(
                f"tensor {i} at address {start:#x}, nbytes {size}, is not inside one range that "
                f"peer {self._peer} has registered: {self._listed()}",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        fitting = inside[self._writable[inside]] if writable else inside
        if not fitting.size:
            raise invalid(
                f"tensor {i} at address {start:#x} is to be written, but its peer registered "
                f"{self._ranges[inside[0]]} with writable=False"
            )
        return int(fitting[self._in_arena[fitting].argmax()])

    def _listed(self) -> str:
        shown = ", ".join(str(it) for it in self._ranges[:_SHOWN_RANGES])
        more = len(self._ranges) - _SHOWN_RANGES
        return f"{shown} and {more} more" if more > 0 else shown or "none at all"
