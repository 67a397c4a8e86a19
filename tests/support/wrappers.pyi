from kvnative._backend import Backend

__all__ = [
    "delay",
    "fail_at",
    "hold",
    "let_go",
    "limit_bandwidth",
    "limit_batch",
    "streams",
    "swap_at",
    "trace",
]

def fail_at(
    backend: Backend,
    descriptor: int,
    status: int = -9,
    code: int = 0,
    *,
    at_submit: bool = False,
) -> Backend: ...
def delay(backend: Backend, ms: float) -> Backend: ...
def hold(backend: Backend) -> Backend: ...
def let_go(held: Backend) -> None: ...
def limit_bandwidth(backend: Backend, bytes_per_second: float) -> Backend: ...
def limit_batch(backend: Backend, max_batch: int) -> Backend: ...
def streams(backend: Backend, pending: int = 0, status: int = 0) -> Backend: ...
def swap_at(backend: Backend, descriptor: int) -> Backend: ...
def trace(backend: Backend, fd: int) -> Backend: ...
