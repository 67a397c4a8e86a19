"""Enums, exceptions and small values of NIXL's interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, IntEnum
from typing import Any, Final

DEFAULT_COMM_PORT: Final = 8888
HAVE_UCX_GPU_DEVICE_API: Final = False
NIXL_INIT_AGENT: Final = ""


class _Exported(IntEnum):
    """An enum that prints with its class, without its number."""

    __str__ = Enum.__str__


class nixl_mem_t(_Exported):  # noqa: N801 - a name of the original, as those below
    """The kind of memory."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(_Exported):  # noqa: N801
    """The direction of a transfer, as its caller sees it."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_cost_t(_Exported):  # noqa: N801
    """The method of a cost estimate."""

    NIXL_COST_ANALYTICAL_BACKEND = 0


class nixl_thread_sync_t(_Exported):  # noqa: N801
    """The threads that may use an agent. kvplan allows all threads in every mode."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


class nixl_status_t(_Exported):  # noqa: N801
    """The state of a transfer, or the number of an error."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class nixlNotPostedError(Exception):  # noqa: N801
    """The transfer was not posted, or is not done."""


class nixlInvalidParamError(Exception):  # noqa: N801
    """An argument is invalid."""


class nixlBackendError(Exception):  # noqa: N801
    """The engine has failed."""


class nixlNotFoundError(Exception):  # noqa: N801
    """An agent, plugin or backend is unknown, or memory is not registered."""


class nixlMismatchError(Exception):  # noqa: N801
    """Bytes are not metadata of an agent."""


class nixlNotAllowedError(Exception):  # noqa: N801
    """Never raised here."""


class nixlRepostActiveError(Exception):  # noqa: N801
    """The transfer is in flight."""


class nixlUnknownError(Exception):  # noqa: N801
    """Never raised here."""


class nixlNotSupportedError(Exception):  # noqa: N801
    """kvplan does not support the call."""


class nixlRemoteDisconnectError(Exception):  # noqa: N801
    """The remote agent is gone."""


class nixlCancelledError(Exception):  # noqa: N801
    """Never raised here."""


class nixlNoTelemetryError(Exception):  # noqa: N801
    """The agent was not made with captureTelemetry."""


@dataclass(slots=True)
class nixlXferTelemetry:  # noqa: N801
    """Times of a transfer in microseconds, by the monotonic clock, and its size."""

    startTime: int = 0  # noqa: N815
    postDuration: int = 0  # noqa: N815
    xferDuration: int = 0  # noqa: N815
    totalBytes: int = 0  # noqa: N815
    descCount: int = 0  # noqa: N815


@dataclass
class nixlAgentConfig:  # noqa: N801
    """Settings of a `nixlAgent`. Only useListenThread, listenPort and captureTelemetry matter."""

    useProgThread: bool = False  # noqa: N815
    useListenThread: bool = False  # noqa: N815
    listenPort: int = DEFAULT_COMM_PORT  # noqa: N815
    syncMode: nixl_thread_sync_t = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE  # noqa: N815
    pthrDelay: int = 0  # noqa: N815
    lthrDelay: int = 100000  # noqa: N815
    captureTelemetry: bool = False  # noqa: N815
    etcdWatchTimeout: Any = field(default_factory=lambda: timedelta(seconds=5))  # noqa: N815
