from typing import Final, Literal, NamedTuple, Never, final

import numpy as np
from numpy.typing import NDArray

from kvnative._device import Device, DeviceError, DeviceLibrary

__all__ = [
    "CopyTuning",
    "CudaError",
    "CudaLibrary",
    "Watch",
    "builtin_copy_tuning",
    "copy_tuning",
    "copy_way",
    "far_copy_tuning",
    "has_batches",
    "limit_copies",
    "limit_registered",
    "tune_copies",
    "watch",
]

_Direction = Literal["host_to_device", "device_to_host", "device_to_device"]

class CudaError(DeviceError): ...

@final
class CudaLibrary(DeviceLibrary):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def load(path: str | None = None, context: str = "primary") -> CudaLibrary: ...
    context: Final[Literal["primary", "own"]]
    def uuid(self, device_id: int) -> str: ...
    def pci_id(self, device_id: int) -> str: ...
    def capability(self, device_id: int) -> tuple[int, int]: ...
    def reaches(self, device_id: int, peer: int) -> bool: ...

class CopyTuning(NamedTuple):
    kernel_below: int
    batch_below: int
    blocks: int

def builtin_copy_tuning(direction: _Direction) -> CopyTuning: ...
def copy_tuning(device: Device, direction: _Direction) -> CopyTuning: ...
def tune_copies(device: Device, direction: _Direction, tuning: CopyTuning) -> None: ...
def has_batches(device: Device) -> bool: ...
def limit_copies(device: Device, *, batch_calls: bool = True, max_blocks: int = 0) -> None: ...
def limit_registered(device: Device, nbytes: int) -> None: ...
def far_copy_tuning() -> CopyTuning: ...
def copy_way(
    device: Device,
    direction: _Direction,
    mean_nbytes: int,
    count: int,
    *,
    is_far: bool = False,
) -> Literal["kernel", "batch", "single"]: ...

@final
class Watch:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def is_replaced(self) -> bool: ...

def watch(
    device: Device, addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64]
) -> tuple[Watch, int]: ...
