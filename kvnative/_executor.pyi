from types import TracebackType
from typing import Never, Self, final

from kvnative._backend import (
    KVN_CANCELLED,
    KVN_DENIED,
    KVN_FAILED,
    KVN_INVALID,
    KVN_NO_MEMORY,
    KVN_OK,
    KVN_PEER_GONE,
    KVN_PENDING,
    KVN_TIMEOUT,
    KVN_UNMAPPED,
    KVN_UNSUPPORTED,
    STRATEGIES,
    Backend,
    Capabilities,
    NativeError,
    ThreadPool,
    delay,
    fail_at,
    host_backend,
    limit_bandwidth,
    limit_batch,
    trace,
)
from kvnative._lower import Descriptors

__all__ = [
    "KVN_CANCELLED",
    "KVN_DENIED",
    "KVN_FAILED",
    "KVN_INVALID",
    "KVN_NO_MEMORY",
    "KVN_OK",
    "KVN_PEER_GONE",
    "KVN_PENDING",
    "KVN_TIMEOUT",
    "KVN_UNMAPPED",
    "KVN_UNSUPPORTED",
    "STRATEGIES",
    "Backend",
    "Capabilities",
    "Executor",
    "NativeError",
    "Report",
    "Task",
    "ThreadPool",
    "delay",
    "fail_at",
    "host_backend",
    "limit_bandwidth",
    "limit_batch",
    "trace",
]

@final
class Report:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def status(self) -> int: ...
    @property
    def code(self) -> int: ...
    @property
    def failed(self) -> int | None: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def descriptors_done(self) -> int: ...
    @property
    def unconfirmed(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def message(self) -> str: ...

@final
class Task:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def report(self) -> Report: ...
    def wait(self, timeout_ms: float | None = None) -> Report: ...
    def cancel(self) -> Report: ...

@final
class Executor:
    def __new__(cls, backend: Backend) -> Self: ...
    @property
    def backend(self) -> Backend: ...
    def submit(self, descriptors: Descriptors, keep: object = ()) -> Task: ...
    def run(
        self, descriptors: Descriptors, timeout_ms: float | None = None, keep: object = ()
    ) -> Report: ...
    def close(self, cancel: bool = False) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
