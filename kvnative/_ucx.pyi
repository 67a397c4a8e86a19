from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Never, final

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

_Kind = Literal["host", "cuda", "rocm"]
_Column = NDArray[np.uint64]

class UcxError(CallError): ...

@final
class UcxLibrary:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @staticmethod
    def load(path: str) -> UcxLibrary: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> tuple[int, int, int]: ...

@final
class UcxWorker:
    def __init__(
        self,
        library: UcxLibrary,
        *,
        settings: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        name: str = "",
    ) -> None: ...
    @property
    def address(self) -> bytes: ...
    @property
    def transports(self) -> str: ...
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
    @property
    def worker(self) -> UcxWorker: ...
    def connect(self, timeout_ms: float) -> None: ...
    @property
    def connected(self) -> bool: ...
    @property
    def failure(self) -> tuple[int, str] | None: ...
    @property
    def death_fd(self) -> int: ...
    @property
    def transport(self) -> str: ...
    def writing(self, tag: int, timeout_ms: float) -> frozenset[tuple[int, int]]: ...
    def close(self, reason: str = "the endpoint was closed") -> None: ...

@final
class UcxRegion:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def worker(self) -> UcxWorker | None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def kind(self) -> _Kind: ...
    @property
    def rkey(self) -> bytes: ...
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
