"""`Hixl` of the original over `kvplan.LlmDataDist`: it checks, converts and returns numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from time import perf_counter
from typing import TYPE_CHECKING, Final, Literal, SupportsIndex

from kvnative._executor import NativeError
from kvnative._ranges import TransferOpDesc, address_columns
from kvnative._signals import Mutex
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.ranges import AddressRanges
from kvplan.hixl.connections import AsyncConnector, Connections
from kvplan.hixl.options import Settings, peer_endpoint, read
from kvplan.hixl.requests import Requests
from kvplan.hixl.values import (
    ALREADY_CONNECTED,
    FAILED,
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
from kvplan.planning.texts import plural
from kvplan.status import LLMException, LLMStatusCode, invalid
from kvplan.system.logs import Log
from kvplan.types import CacheDesc, DataType, LlmRole, Placement
from kvplan.validation import UINT64_MAX

if TYPE_CHECKING:
    from kvplan.execution import Transfers
    from kvplan.planning.plan import Plan

_log = Log("kvplan.hixl")

_REFUSALS = (LLMException, ValueError, NativeError, OSError, MemoryError)
"""What the engine raises; here each is a number, and a line of the log."""

_INT32_MAX = 2**31 - 1
_AUTO_CONNECT_MS = 1000  # of a transfer that has no time of its own
_DIRECTIONS: Final[dict[TransferOp, Literal["pull", "push"]]] = {
    TransferOp.READ: "pull",
    TransferOp.WRITE: "push",
}

_Region = tuple[int, int, bool]
"""Registered memory: address, bytes, and whether it is local only."""


class _Running:
    """What there is between `initialize` and `finalize`."""

    def __init__(self, settings: Settings, transfers: Transfers | None) -> None:
        self.settings = settings
        self.datadist = LlmDataDist(settings.cluster_id, LlmRole.MIX, transfers=transfers)
        self.datadist.initialize(settings.engine)
        self.connections = Connections(self.datadist)
        self.connector = AsyncConnector(
            settings.threads, settings.capacity, f"kvplan-hixl-{settings.name}"
        )
        self.requests = Requests()
        self.registered: dict[int, _Region] = {}  # by handle
        self.handles: dict[_Region, int] = {}  # the other way round
        self.mutex = Mutex()  # of registering

    def place_of(self, mem_type: MemType) -> Placement:
        """Return where memory of this type lies."""
        if mem_type is MemType.MEM_HOST:
            return Placement.HOST
        if self.datadist.device is not None:
            return Placement.DEVICE
        if self.settings.device_is_host:
            return Placement.HOST
        raise LLMException(
            "there is no device: no library of an accelerator was found, or "
            "kvplan.accelerator=none; `kvplan info` says why. Where MEM_DEVICE is to be memory of "
            "this host, give option kvplan.mem_device=host or set KVPLAN_MEM_DEVICE=host",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )

    def close(self) -> None:
        self.connector.stop()
        self.datadist.finalize()
        self.connector.join()


class Hixl:
    """An engine: memory of this process, connections with others, and transfers between them.

    Every call returns a status number, alone or first in a tuple, and logs why it is not SUCCESS
    (logger `kvplan.hixl`). Before `initialize`, and after `finalize`, it is FAILED. Calls may come
    from several threads. Nothing is raised but TypeError, for an argument of another type.

    Args:
        transfers: what copies; None: what this process shares. Not in hixl.
    """

    def __init__(self, *, transfers: Transfers | None = None) -> None:
        self._transfers = transfers
        self._running: _Running | None = None
        self._mutex = Mutex()  # of initialize and finalize

    def initialize(self, local_engine: str, options: Mapping[str, str] | None = None) -> int:
        """Begin to take calls, and to listen if the name has a port; a second time: nothing.

        Args:
            local_engine: "host:port", "[ipv6]:port"; without a port, or with one below 1, it does
                not listen.
            options: those of the original, and of kvplan (`kvplan.transport`...), as text.

        Returns:
            SUCCESS; PARAM_INVALID: no such name, or an impossible option; FAILED: the port is in
            use, say.

        Raises:
            TypeError: an argument of another type.
        """
        check_type("local_engine", local_engine, str)
        given = {} if options is None else options
        check_type("options", given, dict)
        for key, text in given.items():
            check_type("options key", key, str)
            check_type(f"options[{key!r}]", text, str)
        with self._mutex:
            if self._running is not None:
                return SUCCESS
            try:
                self._running = _Running(read(local_engine, given), self._transfers)
            except _REFUSALS as error:
                return _failed(f"initialize {local_engine}", error)
        return SUCCESS

    def finalize(self) -> None:
        """End transfers and connections, and take no more calls; idempotent.

        Transfers in flight are waited for, up to llm.SyncKvCacheWaitTime (1 s), then stopped: on
        return none writes a byte any more.
        """
        with self._mutex:
            running, self._running = self._running, None
            if running is not None:
                try:
                    running.close()
                except _REFUSALS as error:
                    _failed("finalize", error)

    def register_mem(self, mem_desc: MemDesc, mem_type: MemType) -> tuple[int, int]:
        """Let transfers of this engine, and of those connected with it, use memory.

        It must stay mapped until it is deregistered. The same memory again has the same handle.
        Remote engines do not reach memory whose `local_only` is True.

        Returns:
            The status, and the handle (0 unless SUCCESS). PARAM_INVALID: no bytes, address 0,
            memory that is not mapped, or not where `mem_type` says; UNSUPPORTED: MEM_DEVICE where
            there is no device, unless option kvplan.mem_device (environment variable
            KVPLAN_MEM_DEVICE) is "host": then it is memory of this host.

        Raises:
            TypeError: an argument of another type.
        """
        check_type("mem_desc", mem_desc, MemDesc)
        check_type("mem_type", mem_type, MemType)
        address, nbytes = mem_desc.addr, mem_desc.len
        what = f"register_mem {mem_type.name} [{address:#x}, {address + nbytes:#x})"
        running = self._running
        if running is None:
            return _not_initialized(what), 0
        try:
            if address == 0 or nbytes == 0 or address + nbytes > UINT64_MAX + 1:
                raise invalid(
                    f"addr={address:#x}, len={nbytes}: memory has at least 1 byte, does not begin "
                    "at 0, and ends by 2**64"
                )
            region = address, nbytes, mem_desc.local_only
            desc = CacheDesc(1, (1, nbytes), DataType.DT_UINT8, running.place_of(mem_type))
            with running.mutex:
                if (known := running.handles.get(region)) is not None:
                    return SUCCESS, known
                handle = running.datadist.register_cache(
                    desc, [address], remote_accessible=not mem_desc.local_only
                ).cache_id
                running.registered[handle] = region
                running.handles[region] = handle
        except _REFUSALS as error:
            return _failed(what, error), 0
        return SUCCESS, handle

    def deregister_mem(self, mem_handle: int) -> int:
        """Let no transfer use memory any more; on return none does, and it may be freed.

        Those in flight that use it are stopped, and fail: requests, and calls of `transfer_sync` in
        other threads.

        Returns:
            SUCCESS, for a handle that is not known (any more) too; PARAM_INVALID: 0.

        Raises:
            TypeError: an argument of another type.
        """
        mem_handle = _index("mem_handle", mem_handle)
        running = self._running
        if running is None:
            return _not_initialized("deregister_mem")
        if mem_handle == 0:
            return _failed("deregister_mem", invalid("mem_handle=0 is no handle"))
        try:
            with running.mutex:
                known = running.registered.pop(mem_handle, None)
                if known is not None:
                    del running.handles[known]
            if known is not None:
                running.datadist.unregister_cache(mem_handle)
        except _REFUSALS as error:
            return _failed(f"deregister_mem {mem_handle}", error)
        return SUCCESS

    def connect(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Connect with an engine that listens.

        Returns:
            SUCCESS; PARAM_INVALID: no such name, this engine's own, or a timeout below 1;
            ALREADY_CONNECTED; TIMEOUT; FAILED: nobody listens there, say.

        Raises:
            TypeError: an argument of another type.
        """
        check_type("remote_engine", remote_engine, str)
        timeout_in_millis = _index("timeout_in_millis", timeout_in_millis)
        running = self._running
        if running is None:
            return _not_initialized("connect")
        return _connect(running, remote_engine, timeout_in_millis)

    def disconnect(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """End a connection; requests over it that have not ended are stopped.

        Returns:
            SUCCESS; PARAM_INVALID: no such name, or a timeout below 1; NOT_CONNECTED; TIMEOUT: the
            remote engine has not confirmed it.

        Raises:
            TypeError: an argument of another type.
        """
        check_type("remote_engine", remote_engine, str)
        timeout_in_millis = _index("timeout_in_millis", timeout_in_millis)
        running = self._running
        if running is None:
            return _not_initialized("disconnect")
        return _disconnect(running, remote_engine, timeout_in_millis)

    def connect_async(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Connect in the background; `get_async_connect_status` says how far it is.

        Tasks with one remote engine run one after another.

        Returns:
            SUCCESS: it was begun; PARAM_INVALID; RESOURCE_EXHAUSTED: too many wait.

        Raises:
            TypeError: an argument of another type.
        """
        return self._begin(remote_engine, timeout_in_millis, connects=True)

    def disconnect_async(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """End a connection in the background. Otherwise as `connect_async`.

        Raises:
            TypeError: an argument of another type.
        """
        return self._begin(remote_engine, timeout_in_millis, connects=False)

    def get_async_connect_status(self, remote_engine: str) -> tuple[int, AsyncConnectStatus]:
        """Return how far the last asynchronous task with a remote engine is.

        Raises:
            TypeError: an argument of another type.
        """
        check_type("remote_engine", remote_engine, str)
        running = self._running
        if running is None:
            return _not_initialized("get_async_connect_status"), AsyncConnectStatus.NOT_CONNECT
        try:
            peer_endpoint(remote_engine)
        except _REFUSALS as error:
            return _failed("get_async_connect_status", error), AsyncConnectStatus.NOT_CONNECT
        return SUCCESS, _state(running, remote_engine, running.connector.states())

    def get_all_async_connect_status(self) -> tuple[int, dict[str, AsyncConnectStatus]]:
        """Return the same of all remote engines that there was such a task with."""
        running = self._running
        if running is None:
            return _not_initialized("get_all_async_connect_status"), {}
        states = running.connector.states()
        return SUCCESS, {it: _state(running, it, states) for it in states}

    def transfer_sync(
        self,
        remote_engine: str,
        op: TransferOp,
        op_descs: Sequence[TransferOpDesc],
        timeout_in_millis: int = 1000,
    ) -> int:
        """Copy ranges from the memory of a remote engine to memory here, or to there.

        Args:
            remote_engine: which, by the name it was connected with.
            op: READ: from there; WRITE: to there.
            op_descs: the ranges; each must lie in registered memory at both ends, and no byte may
                be written twice.
            timeout_in_millis: what it may take; then it is stopped.

        Returns:
            SUCCESS: every byte has arrived; PARAM_INVALID: a range that is not registered, of no
            bytes, or that overlaps another; NOT_CONNECTED: not connected, or the remote engine has
            gone; TIMEOUT; UNSUPPORTED: memory that the way between the two does not reach; FAILED:
            memory that was deregistered or freed meanwhile, say.

        Raises:
            TypeError: an argument of another type.
        """
        _check_move(remote_engine, op)
        timeout_in_millis = _index("timeout_in_millis", timeout_in_millis)
        columns = address_columns(op_descs)
        running = self._running
        if running is None:
            return _not_initialized("transfer_sync")
        try:
            _check_timeout(timeout_in_millis)
            started = perf_counter()
            cluster = _cluster(running, remote_engine, timeout_in_millis)
            ranges = AddressRanges(cluster, *columns, _DIRECTIONS[op])
            left_ms = timeout_in_millis - (perf_counter() - started) * 1000
            running.datadist.run(ranges, timeout_ms=max(0.0, left_ms))
        except _REFUSALS as error:
            return _failed(_move_text("transfer_sync", remote_engine, op, len(columns[0])), error)
        return SUCCESS

    def transfer_async(
        self,
        remote_engine: str,
        op: TransferOp,
        op_descs: Sequence[TransferOpDesc],
        args: TransferArgs | None = None,
    ) -> tuple[int, int]:
        """Begin what `transfer_sync` does, and return the request to ask for.

        Args:
            args: with `user_data`, which `get_all_transfer_status` gives back.

        Returns:
            The status, and the request (0 unless SUCCESS). As of `transfer_sync`;
            RESOURCE_EXHAUSTED: too many requests were not asked for.

        Raises:
            TypeError: an argument of another type.
        """
        _check_move(remote_engine, op)
        given = TransferArgs() if args is None else args
        check_type("args", given, TransferArgs)
        columns = address_columns(op_descs)
        running = self._running
        if running is None:
            return _not_initialized("transfer_async"), 0
        try:
            running.requests.check_room()
            cluster = _cluster(running, remote_engine, _AUTO_CONNECT_MS)
            ranges = AddressRanges(cluster, *columns, _DIRECTIONS[op])
            task = running.datadist.submit(ranges)
            request = running.requests.add(task, ranges, remote_engine, op, given.user_data)
        except _REFUSALS as error:
            text = _move_text("transfer_async", remote_engine, op, len(columns[0]))
            return _failed(text, error), 0
        return SUCCESS, request

    def get_transfer_status(self, req_id: int) -> tuple[int, TransferStatus]:
        """Return how far a request is; one that has ended is forgotten then.

        Returns:
            SUCCESS and the status; PARAM_INVALID and FAILED: no such request, or its end was told
            before; NOT_CONNECTED and FAILED: it failed as the remote engine has gone.

        Raises:
            TypeError: an argument of another type.
        """
        req_id = _index("req_id", req_id)
        running = self._running
        if running is None:
            return _not_initialized("get_transfer_status"), TransferStatus.FAILED
        try:
            return running.requests.status(req_id)
        except _REFUSALS as error:
            return _failed("get_transfer_status", error), TransferStatus.FAILED

    def get_all_transfer_status(
        self, args: GetTransferStatusArgs | None = None
    ) -> tuple[int, list[TransferResult]]:
        """Return how far all requests are, those submitted first; those that have ended go then.

        Raises:
            TypeError: an argument of another type.
        """
        given = GetTransferStatusArgs() if args is None else args
        check_type("args", given, GetTransferStatusArgs)
        running = self._running
        if running is None:
            return _not_initialized("get_all_transfer_status"), []
        try:
            return SUCCESS, running.requests.all(given)
        except _REFUSALS as error:
            return _failed("get_all_transfer_status", error), []

    def send_notify(
        self, remote_engine: str, notify: NotifyDesc, timeout_in_millis: int = 1000
    ) -> int:
        """Send a message to a remote engine; on SUCCESS it has it, for `get_notifies`.

        Returns:
            SUCCESS; PARAM_INVALID: a name or message of more than 1024 bytes, or a timeout below 1;
            NOT_CONNECTED; RESOURCE_EXHAUSTED: 4096 wait there to be read; TIMEOUT.

        Raises:
            TypeError: an argument of another type.
        """
        check_type("remote_engine", remote_engine, str)
        check_type("notify", notify, NotifyDesc)
        timeout_in_millis = _index("timeout_in_millis", timeout_in_millis)
        running = self._running
        if running is None:
            return _not_initialized("send_notify")
        try:
            _check_timeout(timeout_in_millis)
            running.connections.notify(remote_engine, notify, timeout_in_millis)
        except _REFUSALS as error:
            return _failed(f"send_notify to {remote_engine}", error)
        return SUCCESS

    def get_notifies(self) -> tuple[int, list[NotifyDesc]]:
        """Return all messages that have arrived since it was last called."""
        running = self._running
        if running is None:
            return _not_initialized("get_notifies"), []
        try:
            return SUCCESS, running.connections.take_messages()
        except _REFUSALS as error:
            return _failed("get_notifies", error), []

    @property
    def datadist(self) -> LlmDataDist:
        """The engine below, of kvplan: `on_plan`, `metrics`, `links`, recordings. Not in hixl.

        Raises:
            LLMException: LLM_FAILED: not initialized.
        """
        return self._initialized().datadist

    def plan_transfer(
        self, remote_engine: str, op: TransferOp, op_descs: Sequence[TransferOpDesc]
    ) -> Plan:
        """Return the plan of a transfer, to `explain` and `diff`; nothing moves. Not in hixl.

        Raises:
            TypeError: an argument of another type.
            LLMException: what `transfer_sync` would log.
        """
        _check_move(remote_engine, op)
        columns = address_columns(op_descs)
        running = self._initialized()
        cluster = _cluster(running, remote_engine, _AUTO_CONNECT_MS)
        return running.datadist.plan(AddressRanges(cluster, *columns, _DIRECTIONS[op]))

    def _initialized(self) -> _Running:
        if self._running is None:
            raise LLMException("the engine is not initialized; call initialize() first")
        return self._running

    def _begin(self, remote_engine: str, timeout_ms: int, *, connects: bool) -> int:
        name = "connect_async" if connects else "disconnect_async"
        check_type("remote_engine", remote_engine, str)
        timeout_ms = _index("timeout_in_millis", timeout_ms)
        running = self._running
        if running is None:
            return _not_initialized(name)
        try:
            _check_timeout(timeout_ms)
            peer_endpoint(remote_engine)
            run = partial(_connected if connects else _disconnected, running, remote_engine)
            running.connector.submit(remote_engine, connects=connects, run=partial(run, timeout_ms))
        except _REFUSALS as error:
            return _failed(f"{name} {remote_engine}", error)
        return SUCCESS

    def __repr__(self) -> str:
        running = self._running
        return f"<Hixl {'not initialized' if running is None else running.settings.name}>"


def _connect(running: _Running, remote_engine: str, timeout_ms: int) -> int:
    try:
        _check_timeout(timeout_ms)
        running.connections.connect(remote_engine, timeout_ms)
    except _REFUSALS as error:
        return _failed(f"connect {remote_engine}", error)
    return SUCCESS


def _disconnect(running: _Running, remote_engine: str, timeout_ms: int) -> int:
    try:
        _check_timeout(timeout_ms)
        cluster_id = running.connections.cluster_of(remote_engine)
        running.requests.stop_peer(cluster_id, f"stopped, as {remote_engine} was disconnected")
        running.connections.disconnect(remote_engine, timeout_ms)
    except _REFUSALS as error:
        return _failed(f"disconnect {remote_engine}", error)
    return SUCCESS


def _connected(running: _Running, remote_engine: str, timeout_ms: int) -> bool:
    """Connect in the background; returns whether it is connected then."""
    return _connect(running, remote_engine, timeout_ms) in (SUCCESS, ALREADY_CONNECTED)


def _disconnected(running: _Running, remote_engine: str, timeout_ms: int) -> bool:
    """Disconnect in the background; returns whether it is not connected then."""
    return _disconnect(running, remote_engine, timeout_ms) in (SUCCESS, NOT_CONNECTED)


def _cluster(running: _Running, remote_engine: str, timeout_ms: int) -> int:
    """The cluster of a remote engine that is connected, or with AutoConnect becomes so."""
    connections = running.connections
    if running.settings.auto_connect and not connections.stands(remote_engine):
        try:
            connections.connect(remote_engine, timeout_ms)
        except LLMException as error:
            if error.status_code is not LLMStatusCode.LLM_ALREADY_LINK:  # another thread was first
                raise
    return connections.cluster_of(remote_engine)


def _state(
    running: _Running, remote_engine: str, states: Mapping[str, AsyncConnectStatus]
) -> AsyncConnectStatus:
    """How far the last task is; what it has made may have ended since, or be made otherwise."""
    state = states.get(remote_engine, AsyncConnectStatus.NOT_CONNECT)
    settled = (AsyncConnectStatus.CONNECTED, AsyncConnectStatus.NOT_CONNECT)
    if state in settled:
        return settled[not running.connections.stands(remote_engine)]
    return state


def _failed(what: str, error: BaseException) -> int:
    """The number that a refused or failed call returns; why is logged."""
    status = status_of(error)
    _log.warning("%s: %s: %s", what, STATUS_NAMES[status], error, stacklevel=2)
    return status


def _not_initialized(name: str) -> int:
    _log.warning("%s: FAILED: the engine is not initialized", name, stacklevel=2)
    return FAILED


def _move_text(name: str, remote_engine: str, op: TransferOp, count: int) -> str:
    return f"{name} {op.name} of {remote_engine}, {plural(count, 'range')}"


def _check_move(remote_engine: object, op: object) -> None:
    check_type("remote_engine", remote_engine, str)
    check_type("op", op, TransferOp)


def _index(name: str, value: SupportsIndex) -> int:
    """A whole number, of NumPy too, as the original takes them."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__}; it must be int") from None


def _check_timeout(timeout_ms: int) -> None:
    if not 1 <= timeout_ms <= _INT32_MAX:
        raise invalid(f"timeout_in_millis={timeout_ms} is out of range [1, {_INT32_MAX}]")
