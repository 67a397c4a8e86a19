from collections.abc import Iterable, Mapping
from typing import Final, Literal, Never, final

from kvnative._backend import CallError

__all__ = [
    "UcxEndpoint",
    "UcxError",
    "UcxLibrary",
    "UcxRegion",
    "UcxWorker",
]

_Kind = Literal["host", "cuda"]

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
