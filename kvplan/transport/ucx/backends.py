"""What moves bytes over a link of UCX: messages, or gets and puts of the peer's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from kvnative._backend import striped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvnative._backend import Backend
    from kvnative._ucx import UcxNativeLink
    from kvnative._ucx_one_sided import UcxRegions
    from kvplan.execution.memory import Direction
    from kvplan.transport.ucx.metadata import Metadata, Range

    Column = NDArray[np.uint64]

Local = Literal["host", "cuda"]
"""The kind of this process's memory."""


_STRIPE_NBYTES: Final = 1 << 20
"""What another lane moves at least: 0.3 ms of its time. Threads that sleep are woken for it."""


def gathered(
    natives: Sequence[UcxNativeLink], direction: Direction, ranges: Sequence[Range]
) -> Backend:
    """A backend that asks the peer for its bytes, or sends it some, in messages.

    Args:
        natives: the link's lanes.
        direction: to the peer or from it.
        ranges: of the peer, that it may use.

    Raises:
        NativeError: the link has ended.
    """
    from kvnative._ucx_gathered import gathered_backend

    columns = _columns(ranges)
    # A push begins with some MiB: who calls begins it in the first lane only.
    lanes = [
        gathered_backend(it, direction, *columns, hands_over=direction == "put" and index > 0)
        for index, it in enumerate(natives)
    ]
    return lanes[0] if len(lanes) == 1 else striped(lanes, min_nbytes=_STRIPE_NBYTES)


def one_sided(
    native: UcxNativeLink,
    direction: Direction,
    ranges: Sequence[Range],
    known: Metadata,
    regions: UcxRegions,
    local: Local,
) -> Backend:
    """A backend that reads and writes the peer's memory.

    Args:
        native: the link.
        direction: to the peer or from it.
        ranges: that it may use.
        known: what the peer has told of them: where its board is, and which keys open what.
        regions: of this process.
        local: kind of this process's memory where it is in none of these.

    Raises:
        NativeError: the link has ended, or UCX takes a key for none.
        ValueError: the metadata is not of a transport that is reached so.
    """
    from kvnative._ucx_one_sided import one_sided_backend

    if (board := known.board) is None or any(it.region is None for it in ranges):
        raise ValueError(f"the metadata of {known} names no board, or no region for a range")
    used = sorted({it.region for it in ranges if it.region is not None})
    opened_by = {it.number: it.key for it in known.regions}
    slots, generations, addresses, sizes = _columns(ranges)
    return one_sided_backend(
        native,
        direction,
        regions,
        addresses=addresses,
        nbytes=sizes,
        slots=slots,
        generations=generations,
        keys=np.searchsorted(used, [it.region or 0 for it in ranges]).astype(np.uint64),
        rkeys=[opened_by[number] for number in used],
        board_address=board.address,
        board_slots=board.nbytes // 8,
        board_rkey=board.key,
        local=local,
    )


def _columns(ranges: Sequence[Range]) -> tuple[Column, Column, Column, Column]:
    """Slots, generations, addresses and sizes."""
    fields = ("slot", "generation", "address", "nbytes")
    slots, generations, addresses, sizes = (
        np.array([getattr(it, name) for it in ranges], dtype=np.uint64) for name in fields
    )
    return slots, generations, addresses, sizes
