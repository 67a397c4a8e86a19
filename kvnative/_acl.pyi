from typing import Final, Never, final

from kvnative._device import DeviceError, DeviceLibrary

__all__ = [
    "AclError",
    "AclLibrary",
]

class AclError(DeviceError): ...

@final
class AclLibrary(DeviceLibrary):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def load(path: str | None = None) -> AclLibrary: ...
    has_batch: Final[bool]
    def soc_name(self) -> str: ...
    def finalize(self) -> None: ...
