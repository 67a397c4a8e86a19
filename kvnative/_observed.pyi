from collections.abc import Callable
from typing import Any, final

__all__ = ["CallLog", "tables_of"]

@final
class CallLog:
    active: bool
    awake: bool
    @property
    def add_handle(
        self,
    ) -> Callable[[object, object, object, object, float, object, str], None]: ...
    @property
    def add_made(
        self,
    ) -> Callable[[object, object, object, object, object, Any, object, Any, object], None]: ...
    def __init__(self, wake: Callable[[], object], max_calls: int, max_nbytes: int) -> None: ...
    def __len__(self) -> int: ...
    def add(
        self, note: object, owner: object, begin: float, error: str, picked: tuple[Any, ...]
    ) -> None: ...
    def take(self, count: int) -> tuple[list[tuple[Any, ...]], int]: ...
    def clear(self) -> None: ...

def tables_of(
    here: bytes, there: bytes, num_here: int, count_here: int, num_there: int, count_there: int
) -> tuple[int, int, bytes, bool, int, bytes, bool] | None: ...
