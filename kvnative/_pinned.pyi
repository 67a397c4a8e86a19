from typing import Final, Literal, Never, final

from kvnative._device import Device

__all__ = ["HostBuffer", "Pinned", "allocate_host", "pin", "pinned_by"]

@final
class HostBuffer:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    device: Final[Device]
    address: Final[int]
    nbytes: Final[int]
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Pinned:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    device: Final[Device]
    address: Final[int]
    nbytes: Final[int]
    def close(self) -> None: ...

def allocate_host(device: Device, nbytes: int) -> HostBuffer: ...
def pinned_by(device: Device, address: int, nbytes: int) -> Literal["runtime", "pin", ""]: ...
def pin(device: Device, address: int, nbytes: int, keep: object = None) -> Pinned: ...
