"""What programs of `hixl` name: status numbers, options, enums, and the values of its calls."""

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
    SUCCESS: "SUCCESS",
    PARAM_INVALID: "PARAM_INVALID",
    TIMEOUT: "TIMEOUT",
    NOT_CONNECTED: "NOT_CONNECTED",
    ALREADY_CONNECTED: "ALREADY_CONNECTED",
    NOTIFY_FAILED: "NOTIFY_FAILED",
    UNSUPPORTED: "UNSUPPORTED",
    RESOURCE_EXHAUSTED: "RESOURCE_EXHAUSTED",
    FAILED: "FAILED",
}
"""What the log calls each number."""

_CODES: Final = {
    LLMStatusCode.LLM_PARAM_INVALID: PARAM_INVALID,
    # A range that is not registered; what was deregistered under a transfer is FAILED.
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
    """The status number of what the engine raised; of what moved bytes already, as it fails."""
    if not isinstance(error, LLMException):
        return PARAM_INVALID if isinstance(error, ValueError) else FAILED
    if error.unconfirmed and error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
        return FAILED
    return _CODES.get(error.status_code, FAILED)


class _Exported(IntEnum):
    """Prints as enums of pybind11 do: with the class, and without the number."""

    __str__ = Enum.__str__

    def __format__(self, format_spec: str) -> str:
        """Return the same text."""
        return format(str(self), format_spec)


class MemType(_Exported):
    """Where memory is."""

    MEM_DEVICE = 0
    MEM_HOST = 1


class TransferOp(_Exported):
    """Which way a transfer goes, as its caller sees it."""

    READ = 0
    WRITE = 1


class AsyncConnectStatus(_Exported):
    """How far the last `connect_async` or `disconnect_async` of a remote engine is."""

    NOT_CONNECT = 0
    CONNECT_PENDING = 1
    CONNECTING = 2
    CONNECTED = 3
    CONNECT_FAILED = 4
    DISCONNECT_PENDING = 5
    DISCONNECTING = 6


class FeatureType(_Exported):
    """What can be asked of `get_capability`."""

    AUTO_CONNECT = 0
    CLIENT_SERVER_COMM = 1


class TransferStatus(_Exported):
    """How far an asynchronous transfer is."""

    WAITING = 0
    COMPLETED = 1
    TIMEOUT = 2
    FAILED = 3


def _uint(name: str, value: object, most: int) -> int:
    if not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be int")
    number: int = value.__index__()  # type: ignore[attr-defined]
    if not 0 <= number <= most:
        raise TypeError(f"{name}={number:#x} is out of range [0, {most:#x}]")  # any int has hex
    return number


class _Checked:
    """Objects whose attributes can be set, and are checked then."""

    __slots__: tuple[str, ...] = ()
    _NUMBERS: ClassVar[dict[str, int]] = {}  # the largest value of each
    _TYPES: ClassVar[dict[str, type]] = {}

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._NUMBERS:
            value = _uint(name, value, self._NUMBERS[name])
        elif name in self._TYPES and not isinstance(value, self._TYPES[name]):
            kind = self._TYPES[name].__name__
            raise TypeError(f"{name} is a {type(value).__name__}; it must be {kind}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        own = ((name.lstrip("_"), getattr(self, name)) for name in self.__slots__)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in own)})"


class MemDesc(_Checked):
    """Memory that is registered.

    Args:
        addr: address of its first byte.
        len: number of bytes.
        local_only: True if only transfers of this engine may use it, and no remote engine.

    Raises:
        TypeError: addr or len is not an int in [0, 2**64), or local_only is not a bool, here or
            when it is set.
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
    """What `transfer_async` takes besides.

    Attributes:
        user_data: whatever the caller likes, given back by `get_all_transfer_status`.
    """

    __slots__ = ("user_data",)

    def __init__(self) -> None:
        self.user_data: Any = 0


class GetTransferStatusArgs(_Checked):
    """Which requests `get_all_transfer_status` tells of.

    Args:
        max_query_count: at most so many, of those that were submitted first.
        skip_waiting: leave out, and do not count, those that have not ended.

    Raises:
        TypeError: one of them, here or when it is set, of another type.
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
    """How far a request is.

    Attributes:
        req: the request.
        user_data: as its `TransferArgs` had it.
        status: read-only.
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
        """That of one request."""
        result = cls()
        result.req, result.user_data, result._status = req, user_data, status
        return result

    @property
    def status(self) -> TransferStatus:
        """How far it is."""
        return self._status


class NotifyDesc(_Checked):
    """A message to a remote engine.

    Args:
        name, notify_msg: at most 1024 bytes each, as UTF-8.

    Raises:
        TypeError: one of them, here or when it is set, is no str.
    """

    __slots__ = ("name", "notify_msg")
    _TYPES: ClassVar[dict[str, type]] = {"name": str, "notify_msg": str}
    name: str
    notify_msg: str

    def __init__(self, name: str, notify_msg: str) -> None:
        self.name = name
        self.notify_msg = notify_msg


def get_capability(feature_type: FeatureType) -> tuple[int, int]:
    """Return SUCCESS, and whether a feature is there: FEATURE_SUPPORTED, as both are.

    Raises:
        TypeError: no FeatureType.
    """
    check_type("feature_type", feature_type, FeatureType)
    return SUCCESS, FEATURE_SUPPORTED


def check_type(name: str, value: object, kind: type) -> None:
    """Refuse an argument of another type, as pybind11 does: TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be {kind.__name__}")
