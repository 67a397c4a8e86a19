from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, final

from kvnative._backend import Backend
from kvnative._device import Device
from kvnative._hccl_memory import Guards, HcclLibrary, Region, Staging

__all__ = [
    "HIXL_MAX_BATCH",
    "NUM_TICKETS",
    "Communicator",
    "HixlPeer",
    "Tickets",
]

HIXL_MAX_BATCH: int
NUM_TICKETS: int

class HixlPeer(NamedTuple):
    local: bytes
    remote: bytes
    address: str
    port: int

@final
class Tickets:
    def __init__(self, address: int, owner: object = None) -> None: ...

@final
class Communicator:
    def __init__(
        self,
        library: HcclLibrary,
        device: Device,
        rank_table: str,
        rank: int,
        remote_rank: int,
        name: str,
        *,
        max_batch: int,
        traffic_class: int | None = None,
        service_level: int | None = None,
        peer: HixlPeer | None = None,
    ) -> None: ...
    name: Final[str]
    rank: Final[int]
    remote_rank: Final[int]
    @property
    def state(self) -> Literal["open", "preparing", "ready", "failed", "closed"]: ...
    @property
    def disturbed(self) -> bool: ...
    def disturb(self) -> None: ...
    @property
    def regions(self) -> tuple[Region, ...]: ...
    def bind(self, region: Region) -> None: ...
    def unbind(self, region: Region) -> None: ...
    def prepare(self, timeout_ms: float) -> None: ...
    def backend(
        self,
        direction: Literal["get", "put"],
        guards: Guards | None = None,
        staging: Staging | None = None,
        local: Literal["device", "host"] = "device",
        leases: Sequence[str] = (),
        tickets: Tickets | None = None,
        tag: int = 0,
    ) -> Backend: ...
    def cancel(self, message: str) -> None: ...
    def close(self) -> None: ...
