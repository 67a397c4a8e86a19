from typing import Literal, Never, final

import numpy as np
from numpy.typing import NDArray

from kvnative._acl import AclLibrary
from kvnative._device import Device, DeviceError, DeviceLibrary

__all__ = ["MAX_GUARDS", "Guards", "HcclError", "HcclLibrary", "Region", "Staging"]

MAX_GUARDS: int

class HcclError(DeviceError): ...

@final
class HcclLibrary:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def load(acl: DeviceLibrary, path: str | None = None) -> HcclLibrary: ...
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
        buffer_sets: int = 2,
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
    def buffer_sets(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
