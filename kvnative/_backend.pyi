from collections.abc import Collection, Mapping, Sequence
from typing import Final, Never, Self, final

from kvnative._tuning import Tuning

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
    "MAX_STRIPES",
    "Backend",
    "CallError",
    "NativeError",
    "ThreadPool",
    "host_backend",
    "node_of",
    "striped",
]

KVN_OK: int
KVN_PENDING: int
KVN_TIMEOUT: int
KVN_CANCELLED: int
KVN_INVALID: int
KVN_NO_MEMORY: int
KVN_PEER_GONE: int
KVN_DENIED: int
KVN_UNMAPPED: int
KVN_UNSUPPORTED: int
KVN_FAILED: int
KVN_DEVICE_MEMORY: int
KVN_SUSPECT_REMOTE: int
KVN_NO_DEVICE_MEMORY: int
KVN_REVOKED: int

MAX_STRIPES: int

class NativeError(RuntimeError):
    errno: int
    def __init__(self, message: str = "", number: int = 0) -> None: ...

class CallError(NativeError):
    code: int
    status: int
    def __init__(self, message: str, code: int = 0, status: int = ...) -> None: ...

@final
class ThreadPool:
    def __new__(
        cls,
        threads: int | None = None,
        tuning: Tuning | None = None,
        nodes: Mapping[int, Collection[int]] | None = None,
    ) -> Self: ...
    @property
    def tuning(self) -> Tuning: ...
    @property
    def looks(self) -> int: ...
    @property
    def threads(self) -> int: ...

@final
class Backend:
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    name: Final[str]

def node_of(address: int) -> int | None: ...
def host_backend(pool: ThreadPool) -> Backend: ...
def striped(backends: Sequence[Backend], *, min_nbytes: int) -> Backend: ...
