from types import TracebackType
from typing import Final, Self, final

from kvnative._backend import Backend
from kvnative._layered import LayeredTask
from kvnative._lower import Descriptors
from kvnative._report import Report
from kvnative._task import Gate, Task

__all__ = ["Executor"]

@final
class Executor:
    def __new__(cls, backend: Backend) -> Self: ...
    backend: Final[Backend]
    def submit(
        self,
        descriptors: Descriptors,
        keep: object = (),
        backend: Backend | None = None,
        after: Gate | None = None,
        into: list[Task] | None = None,
    ) -> Task: ...
    def layered(
        self,
        descriptors: Descriptors,
        layer_size: int,
        keep: object = (),
        backend: Backend | None = None,
        into: list[LayeredTask] | None = None,
    ) -> LayeredTask: ...
    def run(
        self,
        descriptors: Descriptors,
        timeout_ms: float | None = None,
        keep: object = (),
        backend: Backend | None = None,
    ) -> Report: ...
    def close(self, cancel: bool = False) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
