from types import TracebackType
from typing import Final, Self, final

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_DENIED,
    KVN_DEVICE_MEMORY,
    KVN_FAILED,
    KVN_INVALID,
    KVN_NO_DEVICE_MEMORY,
    KVN_NO_MEMORY,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_PENDING,
    KVN_REVOKED,
    KVN_SUSPECT_REMOTE,
    KVN_TIMEOUT,
    KVN_UNMAPPED,
    KVN_UNSUPPORTED,
    MAX_STRIPES,
    Backend,
    CallError,
    NativeError,
    ThreadPool,
    host_backend,
    striped,
)
from kvnative._layered import (
    LAYER_DONE,
    LAYER_FAILED,
    LAYER_MOVING,
    LAYER_WAITING,
    LayeredTask,
)
from kvnative._lower import Descriptors
from kvnative._task import CompletionQueue, Gate, Report, Revocable, Task, revoke

__all__ = [
    "KVN_CANCELLED",
    "KVN_DENIED",
    "KVN_DEVICE_MEMORY",
    "KVN_FAILED",
    "KVN_INVALID",
    "KVN_NO_DEVICE_MEMORY",
    "KVN_NO_MEMORY",
    "KVN_OK",
    "KVN_PEER_GONE",
    "KVN_PENDING",
    "KVN_REVOKED",
    "KVN_SUSPECT_REMOTE",
    "KVN_TIMEOUT",
    "KVN_UNMAPPED",
    "KVN_UNSUPPORTED",
    "LAYER_DONE",
    "LAYER_FAILED",
    "LAYER_MOVING",
    "LAYER_WAITING",
    "MAX_STRIPES",
    "Backend",
    "CallError",
    "CompletionQueue",
    "Executor",
    "Gate",
    "LayeredTask",
    "NativeError",
    "Report",
    "Revocable",
    "Task",
    "ThreadPool",
    "host_backend",
    "revoke",
    "striped",
]

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
    ) -> Task: ...
    def layered(
        self,
        descriptors: Descriptors,
        layer_size: int,
        keep: object = (),
        backend: Backend | None = None,
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
