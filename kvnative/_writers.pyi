from collections.abc import Iterable
from typing import Final, NamedTuple, final

from kvnative._backend import Backend, ThreadPool
from kvnative._host import GenerationTable

__all__ = ["Ticket", "WriteGuard", "Writer", "WriterTable"]

class Ticket(NamedTuple):
    pid: int
    entry: int
    place: int
    number: int

@final
class WriterTable:
    def __init__(self, num_entries: int = 4096) -> None: ...
    fd: Final[int]
    inode: Final[int]
    num_entries: Final[int]
    address: Final[int]
    def drain(self, timeout_s: float) -> list[Ticket]: ...
    def end_leases(
        self, generations: GenerationTable, leases: Iterable[tuple[int, int]], timeout_s: float
    ) -> list[Ticket]: ...
    def stands(self, ticket: Ticket) -> bool: ...
    def close(self) -> None: ...

@final
class WriteGuard: ...

@final
class Writer:
    def __init__(
        self,
        pid: int,
        *,
        generations_fd: int,
        generations_inode: int,
        num_slots: int,
        table_fd: int,
        table_inode: int,
        num_entries: int,
        address: int,
    ) -> None: ...
    def guarded(self, words: bytes) -> WriteGuard: ...
    def mapped(self, pool: ThreadPool, words: bytes) -> Backend: ...
    def by_address(self, pool: ThreadPool, words: bytes) -> Backend: ...
    def around(self, inner: Backend, words: bytes) -> Backend: ...
