"""A link to a peer over UCX, and tensors in its registered memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from kvnative._backend import NativeError
from kvnative._ucx_backend import ucx_backend, ucx_leased
from kvplan.execution.task import native_errors
from kvplan.status import LLMException, link_failed, message_of, unsupported
from kvplan.transport.link import Located, PeerMemory, TransportLink, columns
from kvplan.transport.ucx.metadata import Metadata, Range

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvnative._backend import Backend, ThreadPool
    from kvnative._ucx import UcxEndpoint
    from kvplan.execution.memory import Direction, TensorMemory
    from kvplan.lease import BlockLease


class UcxPeerMemory(PeerMemory):
    """Tensors in a peer."""

    _link: UcxLink

    def __init__(self, link: UcxLink, located: Located) -> None:
        super().__init__(link, located)
        self._known: Sequence[Metadata] = located.known  # metadata that names the ranges
        # Backends without extra checks; `_backends` adds them.
        self._plain: dict[tuple[Direction, bool], Backend] = {}
        self._backends: dict[tuple[Direction, bool], Backend] = {}

    def backend(
        self, pool: ThreadPool, direction: Direction, other: TensorMemory, timeout_ms: float | None
    ) -> Backend:
        """See `TensorMemory.backend`.

        LLM_FEATURE_NOT_ENABLED: UCX does not reach the device of `other`.
        """
        if other.on_device and not self._link.takes_device:
            raise unsupported(
                "the local side is in device memory, which UCX does not reach over "
                f"{self._link.way}: pull from or push to {self._link.peer} with a cache in host "
                "memory (Placement.HOST), and copy between that cache and the device"
            )
        way = direction, other.on_device
        if (known := self._backends.get(way)) is not None:
            return known
        if (plain := self._plain.get(way)) is None:
            self._link.check()
            with native_errors(f"{self._link.peer} cannot be reached"):
                made = self._link.backend(
                    direction, self._ranges, self._known, on_device=other.on_device
                )
            plain = self._plain.setdefault(way, made)
        made = ucx_leased(plain, self._extra_checks) if self._extra_checks else plain
        return self._backends.setdefault(way, made)

    def leased(self, leases: Sequence[BlockLease]) -> Self:
        """See `PeerMemory.leased`: a transfer reads the generations of leases too."""
        made = self._copy()
        made._extra_checks = self._extra_checks_with(leases)
        made._known, made._plain, made._backends = self._known, self._plain, {}
        return made


class UcxLink(TransportLink):
    """The link that `UcxTransport.connect` makes.

    Attributes:
        way: The UCX transport that reads and writes the peer's memory, such as
            "rc_mlx5/mlx5_0:1".
        takes_device: True if this process's side of a transfer can be device memory.
    """

    transport = "ucx"
    detects_freed: Literal["after"] = "after"
    checks_every_range = False

    def __init__(
        self, endpoint: UcxEndpoint, metadata: Metadata, on_end: Callable[[], None]
    ) -> None:
        super().__init__(metadata)
        self._endpoint: UcxEndpoint | None = endpoint  # None: closed
        self._on_end = on_end  # called before the endpoint ends
        self.way = endpoint.transport
        self.takes_device = "cuda" in endpoint.worker.transports

    @property
    def death_fd(self) -> int | None:
        """See `TransportLink.death_fd`; None also if UCX does not watch the peer."""
        return None if self._endpoint is None else self._endpoint.death_fd

    def backend(
        self,
        direction: Direction,
        ranges: Sequence[Range],
        known: Sequence[Metadata],
        *,
        on_device: bool,
    ) -> Backend:
        """Return the backend between this process and `ranges`; `known` has their regions."""
        if (endpoint := self._endpoint) is None:
            raise NativeError(f"the link to {self.peer} is closed")
        named = {region.number: region.key for metadata in known for region in metadata.regions}
        keys = [named[found.region] for found in ranges]
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        addresses, nbytes, slots, generations = columns(
            ranges, "address", "nbytes", "slot", "generation"
        )
        return ucx_backend(
            endpoint,
            direction,
            addresses=addresses,
            nbytes=nbytes,
            slots=slots,
            generations=generations,
            keys=np.array([places[key] for key in keys], dtype=np.uint64),
            rkeys=[*places],
            local="cuda" if on_device else "host",
        )

    def _memory(self, located: Located) -> UcxPeerMemory:
        return UcxPeerMemory(self, located)

    def _check_peer(self) -> None:
        if (endpoint := self._endpoint) is not None and (failure := endpoint.failure) is not None:
            raise link_failed(f"{self.peer}: {failure[1]}")

    def _disconnect(self, why: LLMException) -> None:
        if (endpoint := self._endpoint) is not None:
            self._on_end()
            endpoint.close(message_of(why))
            self._endpoint = None  # its descriptor is closed with its last user
