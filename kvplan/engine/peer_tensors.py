"""Memory of a peer that is named by addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplan.status import invalid
from kvplan.validation import INT64_MAX, UINT64_MAX, check_width, shown


@dataclass(frozen=True, slots=True)
class PeerTensors:
    """Where a push goes in a peer: an address for each tensor, given by the peer itself.

    Each address must lie in a tensor of one cache that the peer offers; it is row 0, and there are
    as many rows as that tensor has room for behind it.

    Args:
        cluster_id: of the peer.
        addresses: there, one for each tensor that is transferred, in order.
        stride: bytes of a row (slot or block) there; None: those of the source.

    Raises:
        TypeError: a field of another type.
        ValueError: cluster_id or an address outside uint64, stride outside int64.
        LLMException: LLM_PARAM_INVALID: no address, address 0, or stride below 1.
    """

    cluster_id: int
    addresses: Sequence[int]
    stride: int | None = None

    def __post_init__(self) -> None:
        check_width("cluster_id", self.cluster_id, 0, UINT64_MAX)
        if not isinstance(self.addresses, tuple | list):
            raise TypeError(f"addresses={shown(self.addresses)} must be a tuple or list of int")
        object.__setattr__(self, "addresses", tuple(self.addresses))
        if not self.addresses:
            raise invalid("addresses is empty; one for each tensor is needed")
        for position, address in enumerate(self.addresses):
            if check_width(f"addresses[{position}]", address, 0, UINT64_MAX) == 0:
                raise invalid(f"addresses[{position}]=0 is no address of memory")
        if self.stride is not None and check_width("stride", self.stride, -(2**63), INT64_MAX) < 1:
            raise invalid(f"stride={self.stride} is out of range [1, {INT64_MAX}]")
