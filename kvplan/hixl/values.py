"""Names of `hixl`: status numbers, options, enums, and arguments of its calls."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, ClassVar, Final

from kvplan.status import LLMException, LLMStatusCode
from kvplan.validation import UINT32_MAX, UINT64_MAX

SUCCESS: Final = 0
PARAM_INVALID: Final = 103900
TIMEOUT: Final = 103901
NOT_CONNECTED: Final = 103902
ALREADY_CONNECTED: Final = 103903
NOTIFY_FAILED: Final = 103904
UNSUPPORTED: Final = 103905
RESOURCE_EXHAUSTED: Final = 203900
FAILED: Final = 503900

OPTION_ENABLE_USE_FABRIC_MEM: Final = "EnableUseFabricMem"
OPTION_RDMA_TRAFFIC_CLASS: Final = "RdmaTrafficClass"
OPTION_RDMA_SERVICE_LEVEL: Final = "RdmaServiceLevel"
OPTION_BUFFER_POOL: Final = "BufferPool"
OPTION_GLOBAL_RESOURCE_CONFIG: Final = "GlobalResourceConfig"
OPTION_AUTO_CONNECT: Final = "AutoConnect"
OPTION_LOCAL_COMM_RES: Final = "LocalCommRes"

FEATURE_NOT_SUPPORTED: Final = 0
FEATURE_SUPPORTED: Final = 1

STATUS_NAMES: Final = {
    globals()[name]: name
    for name in (
        *("SUCCESS", "PARAM_INVALID", "TIMEOUT", "NOT_CONNECTED", "ALREADY_CONNECTED"),
        *("NOTIFY_FAILED", "UNSUPPORTED", "RESOURCE_EXHAUSTED", "FAILED"),
    )
}
"""Names of the status numbers in the log."""

_CODES: Final = {
    LLMStatusCode.LLM_PARAM_INVALID: PARAM_INVALID,
    # A range that is not registered. Memory that was deregistered during a transfer is FAILED.
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST: PARAM_INVALID,
    LLMStatusCode.LLM_TIMEOUT: TIMEOUT,
    LLMStatusCode.LLM_NOT_YET_LINK: NOT_CONNECTED,
    LLMStatusCode.LLM_LINK_FAILED: NOT_CONNECTED,
    LLMStatusCode.LLM_ALREADY_LINK: ALREADY_CONNECTED,
    LLMStatusCode.LLM_FEATURE_NOT_ENABLED: UNSUPPORTED,
    LLMStatusCode.LLM_LINK_BUSY: RESOURCE_EXHAUSTED,
    LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT: RESOURCE_EXHAUSTED,
    LLMStatusCode.LLM_OUT_OF_MEMORY: RESOURCE_EXHAUSTED,
    LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY: RESOURCE_EXHAUSTED,
}


def status_of(error: BaseException) -> int:
    """Return the status number of an exception of the engine."""
    if not isinstance(error, LLMException):
        return PARAM_INVALID if isinstance(error, ValueError) else FAILED
    if error.unconfirmed and error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
        return FAILED
    return _CODES.get(error.status_code, FAILED)


class _Exported(IntEnum):
    """An enum that prints as an enum of pybind11: with its class, without its number."""

    __str__ = Enum.__str__

    def __format__(self, format_spec: str) -> str:
        """Format the text of `str`."""
        return format(str(self), format_spec)


class MemType(_Exported):
    """The kind of registered memory."""

    MEM_DEVICE = 0
    MEM_HOST = 1


class TransferOp(_Exported):
    """The direction of a transfer, as its caller sees it."""

    READ = 0
    WRITE = 1


class AsyncConnectStatus(_Exported):
    """The state of the last `connect_async` or `disconnect_async` with a remote engine."""

    NOT_CONNECT = 0
    CONNECT_PENDING = 1
    CONNECTING = 2
    CONNECTED = 3
    CONNECT_FAILED = 4
    DISCONNECT_PENDING = 5
    DISCONNECTING = 6


class FeatureType(_Exported):
    """A feature, for `get_capability`."""

    AUTO_CONNECT = 0
    CLIENT_SERVER_COMM = 1


class TransferStatus(_Exported):
    """The state of an asynchronous transfer."""

    WAITING = 0
    COMPLETED = 1
    TIMEOUT = 2
    FAILED = 3


def _uint(name: str, value: object, maximum: int) -> int:
    if not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be int")
    number: int = value.__index__()  # type: ignore[attr-defined]
    if not 0 <= number <= maximum:
        raise TypeError(
            f"{name}={number:#x} is out of range [0, {maximum:#x}]"
        )  # Python refuses to print a huge int in decimal
    return number


class _Checked:
    """A value whose attributes are checked whenever they are set."""

    __slots__: tuple[str, ...] = ()
    _NUMBERS: ClassVar[dict[str, int]] = {}  # maximum value, by name
    _TYPES: ClassVar[dict[str, type]] = {}

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._NUMBERS:
            value = _uint(name, value, self._NUMBERS[name])
        elif name in self._TYPES and not isinstance(value, self._TYPES[name]):
            kind = self._TYPES[name].__name__
            raise TypeError(f"{name} is a {type(value).__name__}; it must be {kind}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        fields = ((name.lstrip("_"), getattr(self, name)) for name in self.__slots__)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields)})"


class MemDesc(_Checked):
    """A range of memory to register.

    Args:
        addr: address of the first byte.
        len: number of bytes.
        local_only: True if remote engines must not use the range.

    Raises:
        TypeError: addr or len is not an int in [0, 2**64), or local_only is not a bool; also when
            an attribute is set.
    """

    __slots__ = ("addr", "len", "local_only")
    _NUMBERS: ClassVar[dict[str, int]] = {"addr": UINT64_MAX, "len": UINT64_MAX}
    _TYPES: ClassVar[dict[str, type]] = {"local_only": bool}
    addr: int
    len: int
    local_only: bool

    def __init__(
        self,
        addr: int,
        len: int,  # noqa: A002 - the name of the original
        local_only: bool = False,
    ) -> None:
        self.addr = addr
        self.len = len
        self.local_only = local_only


class TransferArgs(_Checked):
    """Optional arguments of `transfer_async`.

    Attributes:
        user_data: any object, which `get_all_transfer_status` returns with the request.
    """

    __slots__ = ("user_data",)

    def __init__(self) -> None:
        self.user_data: Any = 0


class GetTransferStatusArgs(_Checked):
    """A selection of the requests that `get_all_transfer_status` returns.

    Args:
        max_query_count: maximum number of requests, oldest first.
        skip_waiting: True to leave out the requests that have not ended.

    Raises:
        TypeError: an argument of the wrong type; also when an attribute is set.
    """

    __slots__ = ("max_query_count", "skip_waiting")
    _NUMBERS: ClassVar[dict[str, int]] = {"max_query_count": UINT32_MAX}
    _TYPES: ClassVar[dict[str, type]] = {"skip_waiting": bool}
    max_query_count: int
    skip_waiting: bool

    def __init__(self, max_query_count: int = UINT32_MAX, skip_waiting: bool = False) -> None:
        self.max_query_count = max_query_count
        self.skip_waiting = skip_waiting


class TransferResult(_Checked):
    """The state of a request.

    Attributes:
        req: number of the request.
        user_data: from the `TransferArgs` of the request.
    """

    __slots__ = ("_status", "req", "user_data")
    _NUMBERS: ClassVar[dict[str, int]] = {"req": UINT64_MAX}
    req: int
    _status: TransferStatus

    def __init__(self) -> None:
        self.req = 0
        self.user_data: Any = 0
        self._status = TransferStatus.WAITING

    @classmethod
    def of(cls, req: int, user_data: object, status: TransferStatus) -> TransferResult:
        """Return the result of one request."""
        result = cls()
        result.req, result.user_data, result._status = req, user_data, status
        return result

    @property
    def status(self) -> TransferStatus:
        """The state of the request."""
        return self._status


class NotifyDesc(_Checked):
    """A message to a remote engine.

    Args:
        name, notify_msg: at most 1024 bytes each, as UTF-8.

    Raises:
        TypeError: an argument is not a str; also when an attribute is set.
    """

    __slots__ = ("name", "notify_msg")
    _TYPES: ClassVar[dict[str, type]] = {"name": str, "notify_msg": str}
    name: str
    notify_msg: str

    def __init__(self, name: str, notify_msg: str) -> None:
        self.name = name
        self.notify_msg = notify_msg


def get_capability(feature_type: FeatureType) -> tuple[int, int]:
    """Return SUCCESS and FEATURE_SUPPORTED: kvplan has all features.

    Raises:
        TypeError: feature_type is not a FeatureType.
    """
    check_type("feature_type", feature_type, FeatureType)
    return SUCCESS, FEATURE_SUPPORTED


def check_type(name: str, value: object, kind: type) -> None:
    """Raise TypeError for an argument of the wrong type, as pybind11 does."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be {kind.__name__}")
