from typing import Any, Final, Literal, Never, final

from numpy.typing import NDArray
from typing_extensions import Buffer, disjoint_base

from kvnative._backend import Backend, CallError
from kvnative._task import Gate

__all__ = [
    "COPY_DIRECTIONS",
    "Device",
    "DeviceBuffer",
    "DeviceError",
    "DeviceEvent",
    "DeviceLibrary",
]

_Direction = Literal["host_to_device", "device_to_host", "device_to_device"]
COPY_DIRECTIONS: Final[tuple[_Direction, ...]]

class DeviceError(CallError): ...

@disjoint_base
class DeviceLibrary:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    path: Final[str]
    version: Final[str | None]
    missing: Final[tuple[str, ...]]
    def device_count(self) -> int: ...
    def device(self, device_id: int) -> Device: ...

@final
class Device:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    library: Final[DeviceLibrary]
    id: Final[int]
    physical_id: Final[int]
    name: Final[str]
    @property
    def fallback_reason(self) -> str: ...
    @property
    def is_closed(self) -> bool: ...
    def allocate(self, nbytes: int) -> DeviceBuffer: ...
    def locate(
        self, address: int
    ) -> tuple[Literal["device", "host", "managed", "pageable", "foreign"], int]: ...
    def page_nbytes(self, address: int) -> int: ...
    def write(self, address: int, buffer: Buffer | NDArray[Any]) -> None: ...
    def read(self, address: int, buffer: Buffer | NDArray[Any]) -> None: ...
    def clear(self, address: int, nbytes: int) -> None: ...
    def memory(self) -> tuple[int, int]: ...
    def attribute(self, number: int) -> int | None: ...
    def backend(self, direction: _Direction) -> Backend: ...
    def take_event(self, handle: int) -> DeviceEvent: ...
    def take_stream(self, handle: int) -> DeviceEvent: ...
    def close(self) -> None: ...

@final
class DeviceEvent(Gate):
    device: Final[Device]

@final
class DeviceBuffer:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    device: Final[Device]
    address: Final[int]
    nbytes: Final[int]
