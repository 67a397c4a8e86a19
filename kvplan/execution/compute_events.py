"""Events and streams of a model's compute, in the forms that frameworks give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvplan.status import LLMException, invalid, unsupported
from kvplan.validation import shown

if TYPE_CHECKING:
    from kvnative._task import Gate

_HANDLES = 1 << 64


class CudaEvent(Protocol):
    """A CUDA event, such as `torch.cuda.Event`."""

    @property
    def cuda_event(self) -> int:
        """The CUevent; 0 before it was first recorded."""


class CudaStream(Protocol):
    """A CUDA stream, such as `torch.cuda.Stream`."""

    @property
    def cuda_stream(self) -> int:
        """The CUstream; 0 for the default stream."""


class SupportsCudaStream(Protocol):
    """A CUDA stream in the common protocol of libraries, such as `cuda.core.Stream`."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of this method, 0, and the CUstream."""


class NpuEvent(Protocol):
    """An event of an Ascend device, such as `torch_npu.npu.Event`."""

    @property
    def npu_event(self) -> int:
        """The aclrtEvent; 0 before it was first recorded."""


class NpuStream(Protocol):
    """A stream of an Ascend device, such as `torch_npu.npu.Stream`."""

    @property
    def npu_stream(self) -> int:
        """The aclrtStream; 0 for the default stream."""


ComputeStream: TypeAlias = CudaStream | SupportsCudaStream | NpuStream
"""A stream of the accelerator: a program's work runs on it in the order in which it is issued."""


ComputeEvent: TypeAlias = CudaEvent | NpuEvent | ComputeStream | int
"""A point in the work of the accelerator.

An event: the work before its last record. A stream: all work issued to it so far. An int: the
handle of an event (CUevent, aclrtEvent).
"""


GateOf: TypeAlias = "Callable[[str, ComputeEvent], Gate]"
"""A function from the name and the value of an argument to the gate of a transfer."""


StreamOf: TypeAlias = "Callable[[str, ComputeStream], int]"
"""A function from the name and the value of an argument to the handle of a stream."""


def no_accelerator(name: str, event: object) -> LLMException:
    """Return the error of an event or stream for an engine without an accelerator."""
    return unsupported(
        f"{name}={shown(event)}: the engine has no accelerator (option kvplan.accelerator)"
    )


def handle_of(name: str, event: ComputeEvent, prefix: str) -> tuple[bool, int]:
    """Return whether `event` is a stream, and its handle."""
    if isinstance(event, int) and not isinstance(event, bool):
        return False, _checked(name, event, "the handle of an event", 1)
    handle = _read(name, event, f"{prefix}_event")
    if handle is not None:
        found = _checked(name, handle, f"{prefix}_event of {type(event).__name__}", 0)
        if found == 0:
            raise invalid(
                f"{name}={shown(event)} was never recorded; record it on the stream of the work "
                "that the transfer comes after"
            )
        return False, found
    stream = _stream(name, event, prefix)
    if stream is not None:
        return True, stream
    raise TypeError(
        f"{name}={shown(event)} must be an event or a stream of the model's compute, an object "
        f"with {prefix}_event or {prefix}_stream, or the handle of an event, an int, not "
        f"{type(event).__name__}"
    )


def stream_handle_of(name: str, stream: ComputeStream, prefix: str) -> int:
    """Return the handle of a stream."""
    handle = _stream(name, stream, prefix)
    if handle is not None:
        return handle
    raise TypeError(
        f"{name}={shown(stream)} must be a stream of the model's compute, an object with "
        f"{prefix}_stream, not {type(stream).__name__}"
    )


def _stream(name: str, value: object, prefix: str) -> int | None:
    """Return the handle of a stream; None: not a stream. Refuse one of another accelerator."""
    handle = _read(name, value, f"{prefix}_stream")
    if handle is None and prefix == "cuda":
        handle = _named(name, value)
    if handle is not None:
        return _checked(name, handle, f"{prefix}_stream of {type(value).__name__}", 0)
    for other in ("cuda", "npu"):
        if other != prefix and any(
            _read(name, value, f"{other}_{kind}") is not None for kind in ("event", "stream")
        ):
            raise invalid(
                f"{name}={shown(value)} is of another accelerator: it has {other}_event or "
                f"{other}_stream, but the engine's device takes those of {prefix}"
            )
    return None


def _read(name: str, event: object, attribute: str) -> object:
    """Return an attribute of the program's object, or None."""
    try:
        return getattr(event, attribute, None)
    except Exception as error:
        raise _unreadable(name, event, attribute, error) from error


def _named(name: str, event: object) -> object:
    """Return the stream that `__cuda_stream__` gives; None: the object has no such method."""
    method = _read(name, event, "__cuda_stream__")
    if method is None:
        return None
    try:
        version, handle = method()  # type: ignore[operator]
    except Exception as error:
        raise _unreadable(name, event, "__cuda_stream__()", error) from error
    if version != 0:
        raise invalid(
            f"{name}={shown(event)}: __cuda_stream__() speaks version {shown(version)}; kvplan "
            "reads version 0"
        )
    return handle


def _unreadable(name: str, event: object, what: str, error: Exception) -> LLMException:
    return invalid(f"{name}={shown(event)}: {what} cannot be read: {type(error).__name__}: {error}")


def _checked(name: str, handle: object, what: str, least: int) -> int:
    if not isinstance(handle, int) or isinstance(handle, bool) or not least <= handle < _HANDLES:
        raise invalid(f"{name}={shown(handle)}: {what} must be an int in [{least}, 2**64)")
    return handle
