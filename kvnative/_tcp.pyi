from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import Backend, CallError
from kvnative._device import Device

__all__ = [
    "MAX_CONNECTIONS",
    "MAX_THREADS",
    "MAX_TRANSFER_LEASES",
    "TcpError",
    "TcpNativeLink",
    "TcpService",
    "check_encryption",
    "tcp_backend",
]

MAX_CONNECTIONS: int
MAX_TRANSFER_LEASES: int
MAX_THREADS: int

class TcpError(CallError): ...

def check_encryption() -> None: ...

@final
class TcpService:
    def __init__(
        self,
        threads: int,
        *,
        max_ranges: int,
        device: Device | None = None,
        name: str = "kvplan",
    ) -> None: ...
    def add_range(
        self,
        slot: int,
        address: int,
        nbytes: int,
        writable: bool,
        generation: int,
        *,
        on_device: bool = False,
        deadline_ns: int = 0,
    ) -> None: ...
    def renew_range(self, slot: int, deadline_ns: int) -> None: ...
    def remove_range(self, slot: int) -> None: ...
    def link(
        self,
        clients: Sequence[int],
        servers: Sequence[int],
        *,
        peer: str,
        secret: bytes | None = None,
        dials: bool = False,
    ) -> TcpNativeLink: ...
    def close(self) -> None: ...

@final
class TcpNativeLink:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    connections: Final[int]
    @property
    def is_up(self) -> bool: ...
    @property
    def death_fd(self) -> int: ...
    @property
    def failure(self) -> tuple[int, str] | None: ...
    def close(self, reason: str) -> None: ...

def tcp_backend(
    link: TcpNativeLink,
    index: int,
    direction: str,
    slots: NDArray[np.uint64],
    generations: NDArray[np.uint64],
    addresses: NDArray[np.uint64],
    nbytes: NDArray[np.uint64],
    *,
    on_device: bool = False,
    leases: Sequence[tuple[int, int]] = (),
    leases_name: str = "",
) -> Backend: ...
