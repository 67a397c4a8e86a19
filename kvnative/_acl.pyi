from typing import Final, Never, final

from kvnative._device import (
    Device,
    DeviceBuffer,
    DeviceError,
    DeviceLibrary,
    HostBuffer,
    Pinned,
)

__all__ = ["AclError", "AclLibrary", "Device", "DeviceBuffer", "HostBuffer", "Pinned"]

class AclError(DeviceError): ...

@final
class AclLibrary(DeviceLibrary):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def load(path: str | None = None) -> AclLibrary: ...
    has_batch: Final[bool]
    def soc_name(self) -> str: ...
    def finalize(self) -> None: ...
