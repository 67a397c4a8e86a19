"""`Hixl` over `kvplan.LlmDataDist`: checks and converts arguments, and returns status numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial, wraps
from inspect import signature
from operator import index
from time import perf_counter
from typing import Any, Final, Literal, SupportsIndex, TypeVar, cast

from kvnative._ranges import TransferOpDesc, address_columns
from kvnative._signals import Mutex, signals_deferred
from kvplan.addressed.engine import REFUSALS
from kvplan.addressed.names import peer_endpoint
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.ranges import AddressRanges
from kvplan.execution import Transfers
from kvplan.hixl.options import read
from kvplan.hixl.running import CONNECT_STATES, DISCONNECT_STATES, Running
from kvplan.hixl.values import (
    ALREADY_CONNECTED,
    NOT_CONNECTED,
    STATUS_NAMES,
    SUCCESS,
    AsyncConnectStatus,
    GetTransferStatusArgs,
    MemDesc,
    MemType,
    NotifyDesc,
    TransferArgs,
    TransferOp,
    TransferResult,
    TransferStatus,
    check_type,
    status_of,
)
from kvplan.planning.plan import Plan
from kvplan.planning.texts import plural
from kvplan.status import LLMException, invalid
from kvplan.system.logs import Log
from kvplan.validation import as_bytes

_log = Log("kvplan.hixl")

_F = TypeVar("_F", bound=Callable[..., Any])

_INT32_MAX = 2**31 - 1
_MAX_TEXT: Final = 1024  # maximum bytes of a notification's name, and of its message
_AUTO_CONNECT_MS = 1000  # for a transfer without a timeout of its own
_DIRECTIONS: Final[dict[TransferOp, Literal["pull", "push"]]] = {
    TransferOp.READ: "pull",
    TransferOp.WRITE: "push",
}

_KINDS: Final[Mapping[str, type]] = {
    "local_engine": str,
    "options": dict,
    "mem_desc": MemDesc,
    "mem_type": MemType,
    "remote_engine": str,
    "op": TransferOp,
    "notify": NotifyDesc,
}
_INTEGERS: Final = frozenset({"mem_handle", "timeout_in_millis", "req_id"})


def _returns_status(*rest: object) -> Callable[[_F], _F]:
    """Check the types of arguments by name; log an exception, and return its number and `rest`."""

    def decorate(method: _F) -> _F:
        names = tuple(signature(method).parameters)[1:]

        @wraps(method)
        def call(engine: Hixl, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            if len(given) < len(args) + len(kwargs):  # too many or duplicates: TypeError
                return method(engine, *args, **kwargs)
            for name, value in given.items():
                if name in _INTEGERS:
                    given[name] = _index(name, value)
                elif name in _KINDS and not (value is None and name == "options"):
                    check_type(name, value, _KINDS[name])
            try:
                return method(engine, **given)
            except REFUSALS as error:
                status = _log_failure(f"{method.__name__}{_subject(given)}", error)
                return (status, *map(copy, rest)) if rest else status

        return cast("_F", call)

    return decorate


def _subject(given: Mapping[str, Any]) -> str:
    """Return the memory, ranges or peer of a call for the log."""
    match given:
        case {"mem_desc": desc, "mem_type": kind}:
            return f" {kind.name} [{desc.addr:#x}, {desc.addr + desc.len:#x})"
        case {"remote_engine": peer, "op": op, "op_descs": ranges}:
            return f" {op.name} of {peer}, {plural(len(ranges), 'range')}"
        case {"remote_engine": peer} | {"local_engine": peer}:
            return f" {peer}"
    return ""


def _log_failure(text: str, error: BaseException) -> int:
    status = status_of(error)
    _log.warning("%s: %s: %s", text, STATUS_NAMES[status], error, stacklevel=3)
    return status


class Hixl:
    """An engine: memory of this process, connections with other engines, and transfers.

    Calls return a status number, alone or first in a tuple, and log why it is not SUCCESS (logger
    `kvplan.hixl`). Before `initialize` and after `finalize` the number is FAILED. Any thread may
    call the methods.

    Every method raises TypeError for an argument of the wrong type. Methods that the original has
    raise nothing else.

    Args:
        transfers: executes the copies; None: the transfers of this process. Not in hixl.
    """

    def __init__(self, *, transfers: Transfers | None = None) -> None:
        self._transfers = transfers
        self._running: Running | None = None
        self._mutex = Mutex()  # held by initialize and finalize

    @_returns_status()
    def initialize(self, local_engine: str, options: Mapping[str, str] | None = None) -> int:
        """Start the engine, and listen if the name has a port. A second call has no effect.

        Args:
            local_engine: "host:port" or "[ipv6]:port". Without a port, or with a port below 1, the
                engine does not listen.
            options: options of the original and of kvplan (`kvplan.transport`...), as text.

        Returns:
            SUCCESS; PARAM_INVALID: a malformed name, or an invalid option; FAILED: for example, the
            port is in use.
        """
        given = {} if options is None else options
        for key, text in given.items():
            check_type("options key", key, str)
            check_type(f"options[{key!r}]", text, str)
        with self._mutex:
            if self._running is None:
                self._running = Running(read(local_engine, given), self._transfers)
        return SUCCESS

    def finalize(self) -> None:
        """End transfers and connections, and refuse further calls; idempotent.

        Transfers in flight are stopped after llm.SyncKvCacheWaitTime (1 s). On return no transfer
        writes a byte.
        """
        with self._mutex:
            running, self._running = self._running, None
            if running is not None:
                try:
                    running.close()
                except REFUSALS as error:
                    _log_failure("finalize", error)

    @_returns_status(0)
    def register_mem(self, mem_desc: MemDesc, mem_type: MemType) -> tuple[int, int]:
        """Let this engine and connected engines use memory in transfers.

        The memory must stay mapped until it is deregistered. Registering it again returns the same
        handle. Remote engines do not reach memory whose `local_only` is True.

        Returns:
            The status, and the handle (0 unless SUCCESS). PARAM_INVALID: zero bytes, address 0,
            memory that is not mapped or does not match `mem_type`; UNSUPPORTED: MEM_DEVICE on a
            host without a device, unless option kvplan.mem_device (environment variable
            KVPLAN_MEM_DEVICE) is "host", which registers the memory as host memory.
        """
        running = self._initialized()
        region = mem_desc.addr, mem_desc.len, mem_desc.local_only
        place = running.place_of(mem_type)
        with running.mutex, signals_deferred:  # until the handle is known
            if (known := running.handles.get(region)) is not None:
                return SUCCESS, known
            handle = running.register(*region[:2], place, remote_accessible=not mem_desc.local_only)
            running.registered[handle] = region
            running.handles[region] = handle
        return SUCCESS, handle

    @_returns_status()
    def deregister_mem(self, mem_handle: int) -> int:
        """Withdraw memory from transfers. On return no transfer uses it, and it may be freed.

        Requests and `transfer_sync` calls of other threads that use the memory are stopped, and
        fail.

        Returns:
            SUCCESS, even for an unknown handle; PARAM_INVALID: handle 0.
        """
        running = self._initialized()
        if mem_handle == 0:
            raise invalid("mem_handle=0 is not a handle; pass one that register_mem returned")
        if (region := running.registered.get(mem_handle)) is not None:
            with running.mutex:  # first: from here on the memory can be registered anew
                if running.handles.get(region) == mem_handle:
                    del running.handles[region]
            running.deregister(mem_handle)
            # Last: an interrupted call can be repeated, and other threads' calls wait as well.
            running.registered.pop(mem_handle, None)
        return SUCCESS

    @_returns_status()
    def connect(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Connect with an engine that listens.

        Returns:
            SUCCESS; PARAM_INVALID: a malformed name, the name of this engine, or a timeout below 1;
            ALREADY_CONNECTED; TIMEOUT; RESOURCE_EXHAUSTED; FAILED: such as no engine there.
        """
        running = self._initialized(timeout_in_millis)
        running.connections.connect(remote_engine, timeout_in_millis)
        return SUCCESS

    @_returns_status()
    def disconnect(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """End a connection: wait for calls of other threads with it, and stop its requests.

        Returns:
            SUCCESS; PARAM_INVALID: a malformed name, or a timeout below 1; NOT_CONNECTED; TIMEOUT:
            such a call still runs (the connection stays), or the end was not confirmed.
        """
        running = self._initialized(timeout_in_millis)
        cluster_id = running.connections.cluster_of(remote_engine)
        reason = f"stopped because {remote_engine} was disconnected"
        stop = partial(running.requests.stop_peer, cluster_id, reason)
        running.connections.disconnect(remote_engine, timeout_in_millis, stop)
        return SUCCESS

    @_returns_status()
    def connect_async(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Connect in the background; `get_async_connect_status` returns the progress.

        Tasks with one remote engine run one after another.

        Returns:
            SUCCESS: the task is queued; PARAM_INVALID; RESOURCE_EXHAUSTED: the queue is full.
        """
        return self._begin(remote_engine, timeout_in_millis, connects=True)

    @_returns_status()
    def disconnect_async(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """End a connection in the background; see `connect_async`."""
        return self._begin(remote_engine, timeout_in_millis, connects=False)

    @_returns_status(AsyncConnectStatus.NOT_CONNECT)
    def get_async_connect_status(self, remote_engine: str) -> tuple[int, AsyncConnectStatus]:
        """Return the state of a background task that waits, runs or failed, else of the link."""
        running = self._initialized()
        peer_endpoint(remote_engine)
        return SUCCESS, running.async_status(remote_engine, running.connector.states())

    @_returns_status({})
    def get_all_async_connect_status(self) -> tuple[int, dict[str, AsyncConnectStatus]]:
        """Return the states of engines that tasks were for, without those that one has left."""
        running = self._initialized()
        states = running.connector.states()
        return SUCCESS, {name: running.async_status(name, states) for name in states}

    @_returns_status()
    def transfer_sync(
        self,
        remote_engine: str,
        op: TransferOp,
        op_descs: Sequence[TransferOpDesc],
        timeout_in_millis: int = 1000,
    ) -> int:
        """Copy ranges between the memory of a remote engine and local memory.

        Args:
            remote_engine: the name that was used to connect.
            op: READ: from the remote engine; WRITE: to it.
            op_descs: the ranges. Each must lie in registered memory at both ends; destinations must
                not overlap.
            timeout_in_millis: milliseconds until the transfer is stopped.

        Returns:
            SUCCESS: every byte has arrived; PARAM_INVALID: a range that is empty, not registered,
            or overlaps another; NOT_CONNECTED: not connected, or the remote engine is gone;
            TIMEOUT; UNSUPPORTED: memory that the transport does not reach; FAILED: for example,
            memory was deregistered or freed during the transfer.
        """
        columns = address_columns(op_descs)
        running = self._initialized(timeout_in_millis)
        started = perf_counter()
        with running.use(remote_engine, timeout_in_millis) as cluster:
            ranges = AddressRanges(cluster, *columns, _DIRECTIONS[op])
            left_ms = timeout_in_millis - (perf_counter() - started) * 1000
            running.datadist.run(ranges, timeout_ms=max(0.0, left_ms))
        return SUCCESS

    @_returns_status(0)
    def transfer_async(
        self,
        remote_engine: str,
        op: TransferOp,
        op_descs: Sequence[TransferOpDesc],
        args: TransferArgs | None = None,
    ) -> tuple[int, int]:
        """Begin a transfer, and return the number of its request; see `transfer_sync`.

        Args:
            args: its `user_data` is returned with the request by `get_all_transfer_status`.

        Returns:
            The status, and the request (0 unless SUCCESS). A status of `transfer_sync`, or
            RESOURCE_EXHAUSTED: too many requests are open; get the status of some first.
        """
        given = TransferArgs() if args is None else args
        check_type("args", given, TransferArgs)
        columns = address_columns(op_descs)
        running = self._initialized()
        running.requests.check_room()
        with running.use(remote_engine, _AUTO_CONNECT_MS) as cluster:
            ranges = AddressRanges(cluster, *columns, _DIRECTIONS[op])
            return SUCCESS, running.submit(ranges, remote_engine, op.name, given.user_data)

    @_returns_status(TransferStatus.FAILED)
    def get_transfer_status(self, req_id: int) -> tuple[int, TransferStatus]:
        """Return the state of a request; forget the request if it has ended.

        Returns:
            SUCCESS and the state; PARAM_INVALID and FAILED: the request is unknown, or its end was
            returned before; NOT_CONNECTED and FAILED: the remote engine is gone.
        """
        return self._initialized().status(req_id)

    @_returns_status([])
    def get_all_transfer_status(
        self, args: GetTransferStatusArgs | None = None
    ) -> tuple[int, list[TransferResult]]:
        """Return the states of all requests, oldest first; forget the requests that have ended."""
        given = GetTransferStatusArgs() if args is None else args
        check_type("args", given, GetTransferStatusArgs)
        return SUCCESS, self._initialized().statuses(given)

    @_returns_status()
    def send_notify(
        self, remote_engine: str, notify: NotifyDesc, timeout_in_millis: int = 1000
    ) -> int:
        """Send a message. After SUCCESS the remote engine has it, for `get_notifies`.

        Returns:
            SUCCESS; PARAM_INVALID: a name or message of more than 1024 bytes, or a timeout below 1;
            NOT_CONNECTED; TIMEOUT; RESOURCE_EXHAUSTED: too many messages are unread at the peer.
        """
        running = self._initialized(timeout_in_millis)
        name, text = as_bytes("name", notify.name), as_bytes("notify_msg", notify.notify_msg)
        for argument, data in (("name", name), ("notify_msg", text)):
            if len(data) > _MAX_TEXT:
                raise invalid(f"{argument} has {len(data)} bytes; at most {_MAX_TEXT} can be sent")
        running.connections.notify(remote_engine, name, text, timeout_in_millis)
        return SUCCESS

    @_returns_status([])
    def get_notifies(self) -> tuple[int, list[NotifyDesc]]:
        """Return the messages that have arrived since the last call."""
        return SUCCESS, self._initialized().notifies()

    @property
    def datadist(self) -> LlmDataDist:
        """The engine of kvplan, for `on_plan`, `metrics`, `links` and recordings. Not in hixl.

        Raises:
            LLMException: LLM_FAILED: not initialized.
        """
        return self._initialized().datadist

    def plan_transfer(
        self, remote_engine: str, op: TransferOp, op_descs: Sequence[TransferOpDesc]
    ) -> Plan:
        """Return the plan of a transfer, to `explain` and `diff`; no byte moves. Not in hixl.

        Raises:
            TypeError: an argument of the wrong type.
            LLMException: the reason that `transfer_sync` would log.
        """
        check_type("remote_engine", remote_engine, str)
        check_type("op", op, TransferOp)
        columns = address_columns(op_descs)
        running = self._initialized()
        with running.use(remote_engine, _AUTO_CONNECT_MS) as cluster:
            return running.datadist.plan(AddressRanges(cluster, *columns, _DIRECTIONS[op]))

    def _initialized(self, timeout_ms: int = 1) -> Running:
        if self._running is None:
            raise LLMException("the engine is not initialized; call initialize() first")
        if not 1 <= timeout_ms <= _INT32_MAX:
            raise invalid(f"timeout_in_millis={timeout_ms} is out of range [1, {_INT32_MAX}]")
        return self._running

    def _begin(self, remote_engine: str, timeout_ms: int, *, connects: bool) -> int:
        running = self._initialized(timeout_ms)
        peer_endpoint(remote_engine)

        def run() -> bool:
            if connects:
                return self.connect(remote_engine, timeout_ms) in (SUCCESS, ALREADY_CONNECTED)
            return self.disconnect(remote_engine, timeout_ms) in (SUCCESS, NOT_CONNECTED)

        states = CONNECT_STATES if connects else DISCONNECT_STATES
        running.connector.submit(remote_engine, states, run)
        return SUCCESS

    def __repr__(self) -> str:
        running = self._running
        return f"<Hixl {'not initialized' if running is None else running.settings.name}>"


def _index(name: str, value: SupportsIndex) -> int:
    """Return an integer as int; the original also accepts integers of NumPy."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__}; it must be int") from None
