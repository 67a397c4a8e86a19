import threading
from types import TracebackType
from typing import Final

__all__ = ["Condition", "GuardedLock", "Mutex", "signals_deferred"]

class Deferral:
    def __enter__(self) -> None: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

signals_deferred: Final[Deferral]
RLock = threading.RLock

class GuardedLock:
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> object: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

Mutex = threading.RLock

class Condition(threading.Condition):
    def __init__(self, mutex: RLock | None = None) -> None: ...
