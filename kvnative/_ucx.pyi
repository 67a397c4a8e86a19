from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, Never, final

import numpy as np
from numpy.typing import NDArray

from kvnative._backend import Backend, CallError

__all__ = [
    "UcxEndpoint",
    "UcxError",
    "UcxLibrary",
    "UcxRegion",
    "UcxWorker",
    "ucx_backend",
    "ucx_leased",
]

_Kind = Literal["host", "cuda"]
_Column = NDArray[np.uint64]

class UcxError(CallError): ...

@final
class UcxLibrary:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def load(path: str) -> UcxLibrary: ...
    path: Final[str]
    version: Final[tuple[int, int, int]]

@final
class UcxWorker:
    def __init__(
        self,
        library: UcxLibrary,
        *,
        settings: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        name: str = "",
    ) -> None: ...
    address: Final[bytes]
    transports: Final[str]
    def map(
        self, address: int, nbytes: int, *, kind: _Kind = "host", owner: object = None
    ) -> UcxRegion: ...
    def tickets(self) -> UcxRegion: ...
    def endpoint(
        self,
        address: bytes,
        *,
        generations_address: int,
        num_slots: int,
        generations_rkey: bytes,
        tickets_address: int,
        tickets_rkey: bytes,
        tag: int,
    ) -> UcxEndpoint: ...
    def close(self) -> None: ...

@final
class UcxEndpoint:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    worker: Final[UcxWorker]
    def connect(self, timeout_ms: float) -> None: ...
    @property
    def connected(self) -> bool: ...
    @property
    def failure(self) -> tuple[int, str] | None: ...
    death_fd: Final[int]
    @property
    def transport(self) -> str: ...
    def writing(self, tag: int, timeout_ms: float) -> frozenset[tuple[int, int]]: ...
    def close(self, reason: str = "the endpoint was closed") -> None: ...

@final
class UcxRegion:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def worker(self) -> UcxWorker | None: ...
    address: Final[int]
    nbytes: Final[int]
    kind: Final[_Kind]
    rkey: Final[bytes]
    @property
    def released(self) -> bool: ...
    def release(self) -> None: ...

def ucx_backend(
    endpoint: UcxEndpoint,
    direction: Literal["get", "put"],
    *,
    addresses: _Column,
    nbytes: _Column,
    slots: _Column,
    generations: _Column,
    keys: _Column,
    rkeys: Sequence[bytes],
    local: _Kind = "host",
) -> Backend: ...
def ucx_leased(backend: Backend, leases: Iterable[tuple[int, int, str]]) -> Backend: ...
