from typing import Final, Literal, Never, final

import numpy as np
from numpy.typing import NDArray

from kvnative._acl import AclLibrary
from kvnative._device import Device, DeviceError, DeviceLibrary

__all__ = [
    "ENDPOINT_NBYTES",
    "MAX_GUARDS",
    "Guards",
    "HcclError",
    "HcclLibrary",
    "Region",
    "Server",
    "Staging",
]

ENDPOINT_NBYTES: int
MAX_GUARDS: int

class HcclError(DeviceError): ...

@final
class HcclLibrary:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def load(
        acl: DeviceLibrary, path: str | None = None, *, client_server: bool = False
    ) -> HcclLibrary: ...
    acl: Final[AclLibrary]
    path: Final[str]
    missing: Final[tuple[str, ...]]
    driver: Final[str]
    def check_host(self, device: Device, address: int, nbytes: int) -> None: ...
    def registered(self, device_id: int) -> tuple[int, int]: ...
    generation: Final[Literal["global", "per_comm", "client_server"]]

@final
class Server:
    def __init__(
        self, library: HcclLibrary, device: Device, endpoints: bytes, address: str, port: int
    ) -> None: ...
    def close(self) -> None: ...

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
    address: Final[int]
    nbytes: Final[int]
    on_device: Final[bool]
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
        slot_nbytes: int = 8 << 20,
        buffer_sets: int = 2,
    ) -> None: ...
    region: Final[Region]
    nbytes: Final[int]
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
