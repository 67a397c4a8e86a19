from collections.abc import Iterable
from typing import Final, Literal, Never, final

from kvnative._device import Device

__all__ = [
    "Exported",
    "Imported",
    "check_reach",
    "export",
    "import_handle",
    "import_here",
    "import_pieces",
]

@final
class Exported:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    address: Final[int]
    nbytes: Final[int]
    fd: Final[int]
    handle: Final[bytes]
    device: Final[Device]
    num_pieces: Final[int]
    def take(self, first: int, count: int) -> list[tuple[int, int]]: ...

@final
class Imported:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    device: Final[Device]
    address: Final[int]
    nbytes: Final[int]

def export(device: Device, address: int, nbytes: int) -> Exported: ...
def import_handle(device: Device, handle: bytes, nbytes: int, *, is_far: bool) -> Imported: ...
def import_here(device: Device, owner: Device, address: int, nbytes: int) -> Imported: ...
def import_pieces(
    device: Device, nbytes: int, batches: Iterable[list[tuple[int, int]]], *, is_far: bool
) -> Imported: ...
def check_reach(
    device: Device, uuid: bytes, *, both_ways: bool
) -> Literal["same", "other", "hidden"]: ...
