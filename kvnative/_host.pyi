from types import TracebackType
from typing import Any, Final, Literal, Self, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

__all__ = [
    "ARENA_PAGES",
    "Arena",
    "GenerationTable",
    "PageWalk",
    "Pin",
    "check_memory",
    "check_ranges",
    "page_use",
]

ARENA_PAGES: dict[str, int]
MAPS_SOURCES: dict[str, int]

def check_memory(
    address: int,
    nbytes: int,
    writable: bool = False,
    *,
    via: Literal["auto", "query", "text"] = "auto",
) -> None: ...
def check_ranges(
    addresses: NDArray[np.uint64],
    nbytes: NDArray[np.uint64],
    writable: bool = False,
    *,
    name: str = "range",
    first: int = 0,
    via: Literal["auto", "query", "text"] = "auto",
) -> None: ...

@final
class Arena:
    def __init__(
        self,
        nbytes: int,
        *,
        prefault: bool = False,
        name: str = "kvplan",
        pages: str = "auto",
        node: int = -1,
    ) -> None: ...
    @staticmethod
    def of_peer(pid: int, fd: int, inode: int, nbytes: int, *, writable: bool) -> Arena: ...
    def populate(self) -> None: ...
    address: Final[int]
    nbytes: Final[int]
    inode: Final[int]
    fd: Final[int]
    writable: Final[bool]
    pages: Final[str]
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class PageWalk:
    def __new__(cls, nbytes: int, *, collapse: bool = False) -> Self: ...
    def advance(self, arena: Arena, seconds: float) -> int: ...
    def again(self) -> None: ...
    def stop(self) -> None: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def is_pass_over(self) -> bool: ...
    @property
    def is_complete(self) -> bool: ...

def page_use(address: int, nbytes: int) -> tuple[int, int | None, int | None]: ...

@final
class Pin:
    def __init__(self, exporter: Buffer | NDArray[Any], *, writable: bool = False) -> None: ...
    address: Final[int]
    nbytes: Final[int]
    writable: Final[bool]
    def release(self) -> None: ...

@final
class GenerationTable:
    def __init__(self, num_slots: int = 65536, num_leases: int = 0) -> None: ...
    def take(self, is_lease: bool = False, *, deadline_ns: int = 0) -> tuple[int, int]: ...
    def renew(self, slot: int, generation: int, deadline_ns: int) -> None: ...
    def release(self, slot: int, generation: int) -> None: ...
    fd: Final[int]
    inode: Final[int]
    address: Final[int]
    num_slots: Final[int]
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
