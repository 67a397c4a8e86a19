from typing import Literal, Never, final

import numpy as np
from numpy.typing import NDArray

from kvnative._acl import AclLibrary, Device
from kvnative._backend import Backend, NativeError

__all__ = [
    "MAX_GUARDS",
    "Communicator",
    "Guards",
    "HcclError",
    "HcclLibrary",
    "Region",
    "Staging",
]

MAX_GUARDS: int

class HcclError(NativeError):
    code: int
    status: int
    def __init__(self, message: str, code: int = 0, status: int = -9) -> None: ...

@final
class HcclLibrary:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def load(acl: AclLibrary, path: str | None = None) -> HcclLibrary: ...
    @property
    def acl(self) -> AclLibrary: ...
    @property
    def path(self) -> str: ...
    @property
    def missing(self) -> tuple[str, ...]: ...
    @property
    def generation(self) -> Literal["global", "per_comm"]: ...

@final
class Region:
    def __init__(
        self,
        library: HcclLibrary,
        device: Device,
        address: int,
        nbytes: int,
        *,
        on_device: bool,
        owner: object = None,
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def on_device(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...

@final
class Guards:
    def __init__(self, addresses: NDArray[np.uint64], expected: NDArray[np.uint64]) -> None: ...
    def __len__(self) -> int: ...

@final
class Staging:
    def __init__(
        self,
        library: HcclLibrary,
        device: Device,
        *,
        slot_nbytes: int = 4 << 20,
        slots: int = 4,
        lanes: int = 2,
    ) -> None: ...
    @property
    def region(self) -> Region: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def slot_nbytes(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...

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
        traffic_class: int | None = None,
        service_level: int | None = None,
        max_batch: int = 256,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def remote_rank(self) -> int: ...
    @property
    def state(self) -> Literal["open", "preparing", "ready", "failed", "closed"]: ...
    @property
    def disturbed(self) -> bool: ...
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
    ) -> Backend: ...
    def cancel(self, message: str) -> None: ...
    def async_error(self) -> tuple[int, str]: ...
    def close(self) -> None: ...
