"""CUDA devices through the driver API: its library, opened at run time, and its errors."""

from typing import Literal, Never, final

from kvnative._device import (
    Device,
    DeviceBuffer,
    DeviceError,
    DeviceLibrary,
    HostBuffer,
    Pinned,
)

__all__ = ["CudaError", "CudaLibrary", "Device", "DeviceBuffer", "HostBuffer", "Pinned"]

class CudaError(DeviceError): ...

@final
class CudaLibrary(DeviceLibrary):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def load(path: str | None = None, context: str = "primary") -> CudaLibrary: ...
    @property
    def context(self) -> Literal["primary", "own"]: ...
    @property
    def missing(self) -> tuple[str, ...]: ...
    def device_count(self) -> int: ...
    def uuid(self, device_id: int) -> str: ...
    def pci_id(self, device_id: int) -> str: ...
    def capability(self, device_id: int) -> tuple[int, int]: ...
