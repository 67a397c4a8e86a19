"""`nixlAgent`: memory by addresses, remote agents by their metadata, and transfers between them."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvnative._executor import NativeError
from kvnative._ranges import choose, first_overlap
from kvnative._signals import Mutex
from kvplan.addressed.connector import Connector
from kvplan.addressed.engine import AddressedEngine, Request
from kvplan.control.endpoint import Endpoint
from kvplan.engine.option_sources import configured
from kvplan.engine.options import Options
from kvplan.engine.ranges import AddressRanges
from kvplan.nixl.lists import Rows, nixlRegDList, nixlXferDList, rows_of_array
from kvplan.nixl.metadata import Listener, Metadata, Region, Regions, ask
from kvplan.nixl.values import (
    nixl_mem_t,
    nixl_status_t,
    nixl_xfer_op_t,
    nixlAgentConfig,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlXferTelemetry,
)
from kvplan.planning.ranges import span_text
from kvplan.planning.texts import plural
from kvplan.status import LLMException, LLMStatusCode, link_failed
from kvplan.system.limits import start_thread
from kvplan.system.logs import Log
from kvplan.tensors.strided import pieces_of
from kvplan.types import Placement

_log = Log("kvplan.nixl")

BACKENDS: Final = ("UCX", "KVPLAN")
"""Names of the one backend. Programs ask for UCX."""

_CONNECT_MS: Final = 10_000
_DISCONNECT_MS: Final = 1_000
_REFUSALS = (LLMException, ValueError, NativeError, OSError, MemoryError)
_GONE = (LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_FAILED)
_SUCCESS, _IN_PROGRESS = nixl_status_t.NIXL_SUCCESS, nixl_status_t.NIXL_IN_PROG


Column = NDArray[np.uint64]


class _Side(NamedTuple):
    """One side of transfers: descriptors that were found in registered memory."""

    agent: str  # empty: this agent
    is_local: bool
    kind: nixl_mem_t
    rows: Rows


@dataclass(eq=False)
class _Transfer:
    """A request: ranges, and its last post."""

    agent: str
    operation: nixl_xfer_op_t
    local: Column
    remote: Column
    sizes: Column
    nbytes: int
    message: bytes
    status: nixl_status_t | None = None  # None: not posted
    error: LLMException | None = None
    request: Request | None = None
    began: float = 0.0  # seconds of the monotonic clock, of the last post
    posted: float = 0.0
    ended: float = 0.0
    ranges: AddressRanges | None = None  # of the last post

    @property
    def text(self) -> str:
        """The transfer as lines of the log name it."""
        return f"{self.operation.name} of {plural(len(self.sizes), 'descriptor')}"


class _Remote(NamedTuple):
    instance: int
    address: str
    regions: Regions


class nixlAgent:  # noqa: N801 - a name of the original, as those of the methods
    """An agent. Errors are exceptions; the log of `kvplan.nixl` names the range and the reason.

    Any thread may call the methods. After `releaseXferReq`, `invalidateRemoteMD` and
    `deregisterMem` no byte moves that they are about.
    """

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        if not name:
            raise ValueError("Agent needs a non-empty name")
        self.name = name
        self._config = config
        self._mutex = Mutex()
        self._remotes: dict[str, _Remote] = {}
        self._local = Regions("this agent")
        self._handles: defaultdict[Region, list[int]] = defaultdict(list)
        self._backends: dict[str, int] = {}
        self._numbers = count(1)
        self._sides: dict[int, _Side] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._looped: list[bytes] = []  # messages of this agent to itself
        given = {} if "listen_ip_info" in configured() else {"llm.ListenIpInfo": "127.0.0.1:0"}
        self.engine = AddressedEngine(
            secrets.randbits(64), replace(Options.of(given), max_tensors=1), self._where, _log
        )
        self._connector = Connector(2, 1 << 16, f"kvplan-nixl-{name}"[:60], _log)
        self._listener: Listener | None = None
        if config.useListenThread:
            host = Endpoint.parse(self._address).host
            self._listener = Listener(
                host, config.listenPort, self.getLocalMD, self.loadRemoteMD, self.invalidateRemoteMD
            )

    @property
    def _address(self) -> str:
        return self.engine.datadist.listen_address or ""

    def close(self) -> None:
        """End transfers, links and threads. Not in NIXL, which does so when an agent is freed."""
        if self._listener is not None:
            self._listener.close()
        self._connector.stop()
        self.engine.datadist.finalize()
        self._connector.join()

    def __del__(self, ignoring: Any = suppress) -> None:  # a global may be gone at the exit
        with ignoring(Exception):  # also of an agent that was never made
            self.close()

    # Plugins and backends: there is one, by several names.

    def getAvailPlugins(self) -> list[str]:  # noqa: N802
        """Return the names of the plugins."""
        return sorted(BACKENDS)

    def getPluginParams(self, name: str) -> tuple[dict[str, str], list[nixl_mem_t]]:  # noqa: N802
        """Return what a plugin is, and the kinds of memory that it moves."""
        if name not in BACKENDS:
            return {}, []
        from kvplan import __version__

        links = {link.transport or "" for link in self.engine.datadist.links()}
        real = {"kvplan": __version__, "transports": ",".join(sorted(links - {""}))}
        return real, [nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG]

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[nixl_mem_t]]:  # noqa: N802
        """Return the same of a backend by its handle."""
        for name, handle in self._backends.items():
            if handle == backend:
                return self.getPluginParams(name)
        raise nixlNotFoundError(f"backend {backend} does not exist")

    def createBackend(self, name: str, params: Any = None) -> int:  # noqa: N802
        """Make a backend; its parameters have no effect."""
        if name not in BACKENDS:
            raise nixlNotFoundError(f"plugin {name!r} does not exist; there are {BACKENDS}")
        if name in self._backends:
            raise nixlInvalidParamError(f"backend {name!r} exists already")
        _log.info("agent %s: backend %s is kvplan's (%s)", self.name, name, self._address)
        self._backends[name] = next(self._numbers)
        return self._backends[name]

    # Memory.

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:  # noqa: N802
        """Let transfers use memory until it is deregistered."""
        kind = descs.getType()
        has_device = self.engine.datadist.device is not None
        if not self._backends or kind > nixl_mem_t.VRAM_SEG or (kind and not has_device):
            raise nixlNotFoundError(f"no backend of agent {self.name} has memory of {kind}")
        place = Placement.DEVICE if kind else Placement.HOST
        made: list[tuple[Region, int]] = []
        with self._mutex:
            try:
                for region, text in zip(_regions(descs), descs.texts, strict=True):
                    name = text.decode(errors="replace")
                    handle = (
                        self.engine.register(*region[1:3], place, name=name) if region[2] else 0
                    )
                    made.append((region, handle))
            except _REFUSALS as error:
                for _, handle in made:
                    self.engine.deregister(handle)
                raise self._logged("register_memory", error) from error
            for region, handle in made:
                self._handles[region].append(handle)
            self._local.add(region for region, _ in made)
        return _SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:  # noqa: N802
        """Withdraw memory; on return no transfer uses it, and it may be freed."""
        regions = _regions(descs)
        with self._mutex:
            if missing := [region for region in regions if not self._handles.get(region)]:
                raise nixlNotFoundError(f"{_region_text(missing[0])} is not registered")
            ended = [self._handles[region].pop() for region in regions]
            for region in regions:
                if not self._handles[region]:
                    del self._handles[region]
                    self._local.remove(region)
        for handle in filter(None, ended):
            self.engine.deregister(handle)
        return _SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:  # noqa: N802
        """Refuse: no backend here has files or objects."""
        raise nixlNotSupportedError("kvplan has no files and no objects to query")

    # Remote agents.

    def getLocalMD(self) -> bytes:  # noqa: N802
        """Return the metadata of this agent, for `loadRemoteMD` of others."""
        regions = list(self._local.regions)
        return self._metadata(regions, is_partial=False, has_address=True)

    def getLocalPartialMD(  # noqa: N802
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        """Return metadata of some registered memory."""
        regions = _regions(descs)
        if missing := [region for region in regions if region not in self._local.regions]:
            raise nixlNotFoundError(f"{_region_text(missing[0])} is not registered")
        return self._metadata(regions, is_partial=True, has_address=inc_conn_info)

    def _metadata(self, regions: list[Region], *, is_partial: bool, has_address: bool) -> bytes:
        address = self._address if has_address else ""
        instance = self.engine.datadist.cluster_id
        return Metadata(self.name, instance, address, is_partial, regions).to_bytes()

    def loadRemoteMD(self, data: bytes | str) -> bytes:  # noqa: N802
        """Know a remote agent, link with it in the background, and return its name."""
        found = Metadata.from_bytes(data if isinstance(data, bytes) else data.encode())
        name = found.name
        if name == self.name:
            raise nixlInvalidParamError(f"the metadata is of an agent of this name, {name!r}")
        with self._mutex:
            known = self._remotes.get(name)
            if known is not None and known.instance != found.instance:
                if found.address:
                    self.invalidateRemoteMD(name)  # it has started again
                known = None
            if known is None and not found.address:
                raise nixlNotFoundError(f"agent {name!r} is unknown, and its address is not given")
            if known is not None and found.is_partial:
                known.regions.add(found.regions)
            else:
                address = found.address or (known.address if known else "")
                regions = Regions(f"agent {name!r}", found.regions)
                self._remotes[name] = _Remote(found.instance, address, regions)
        if known is None:
            self._connector.submit(name, range(4), lambda: self._connect(name))
        return name.encode()

    def _connect(self, name: str) -> bool:
        try:
            self._linked(name)
        except (*_REFUSALS, nixlNotFoundError) as error:
            _log.warning("agent %s cannot connect with %s: %s", self.name, name, error)
            return False
        return True

    def _where(self, name: str) -> tuple[Endpoint, int]:
        remote = self._remote(name)
        return Endpoint.parse(remote.address), remote.instance

    def _remote(self, name: str) -> _Remote:
        remote = self._remotes.get(name)
        if remote is None:
            raise nixlNotFoundError(f"agent {name!r} is not known; load its metadata first")
        return remote

    def _linked(self, name: str) -> int:
        """Return the cluster of a remote agent; wait for its link."""
        self._remote(name)
        return self.engine.connect(name, _CONNECT_MS)

    def _reached(self, name: str) -> int:
        """Return the same for a transfer; an agent that takes no link is gone: LLM_LINK_FAILED."""
        try:
            return self._linked(name)
        except LLMException as error:
            raise link_failed(str(error.args[0])) from error

    def makeConnection(self, name: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:  # noqa: N802
        """Wait for the link with a remote agent."""
        try:
            self._linked(text_of(name))
        except _REFUSALS as error:
            raise self._logged(f"make_connection with {text_of(name)}", error) from error
        return _SUCCESS

    def invalidateRemoteMD(self, name: str | bytes) -> nixl_status_t:  # noqa: N802
        """Forget a remote agent, and stop what is in flight with it; idempotent."""
        name = text_of(name)
        with self._mutex:
            remote = self._remotes.get(name)
            if remote is None:
                return _SUCCESS
            self.engine.requests.stop_peer(remote.instance, f"agent {name!r} was removed")
            for transfer in list(self._transfers.values()):
                if transfer.agent == name and transfer.request is not None:
                    transfer.request.task.cancel(LLMException(f"agent {name!r} was removed"))
            try:
                self.engine.connections.disconnect(name, _DISCONNECT_MS)
            except _REFUSALS as error:
                _log.info("agent %s: %s was not connected: %s", self.name, name, error)
            self._remotes.pop(name, None)
        return _SUCCESS

    def checkRemoteMD(self, name: str | bytes, descs: nixlXferDList) -> nixl_status_t:  # noqa: N802
        """Raise nixlNotFoundError unless the agent is known, and has registered the descriptors."""
        remote = self._remote(text_of(name))
        if not descs.isEmpty():
            self._check(remote.regions, "remote", descs.getType(), descs.rows)
        return _SUCCESS

    def fetchRemoteMD(  # noqa: N802
        self, name: str | bytes, ip_addr: str = "", port: int = 0, label: str = ""
    ) -> None:
        """Load an agent's metadata from its listening thread, in the background."""
        self._aside(ip_addr, port, b"get", self.loadRemoteMD)

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:  # noqa: N802
        """Give the metadata to another agent's listening thread, in the background."""
        self._aside(ip_addr, port, b"put " + self.getLocalMD())

    def sendLocalPartialMD(  # noqa: N802
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = (),
        ip_addr: str = "", port: int = 0, label: str = "",
    ) -> None:  # fmt: skip
        """Give metadata of some memory to another agent's listening thread."""
        data = self.getLocalPartialMD(descs, inc_conn_info, backends)
        self._aside(ip_addr, port, b"put " + data)

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:  # noqa: N802
        """Let another agent forget this one, through its listening thread."""
        self._aside(ip_addr, port, b"drop " + self.name.encode())

    def _aside(
        self, host: str, port: int, request: bytes, load: Callable[[bytes], object] | None = None
    ) -> None:
        if not host:
            raise nixlInvalidParamError("ip_addr is empty, and kvplan has no metadata server")

        def run() -> None:
            try:
                answer = ask(host, port, request, has_answer=load is not None)
                if load is not None:
                    load(answer)
            except Exception as error:  # the caller polls checkRemoteMD
                _log.warning("agent %s: %s:%s: %s", self.name, host, port, error)

        start_thread("kvplan-nixl-metadata", run)

    # Transfers.

    def prepXferDlist(self, *given: Any, **named: Any) -> int:  # noqa: N802
        """Find descriptors in registered memory, and return a handle for `makeXferReq`.

        Called with (agent_name, descs, backend=[]), (descs, backend=[]), or
        (agent_name, mem_type, array, backend=[]), whose array has 3 columns, or 5: with a stride
        and a count.
        """
        values = [*given, *named.values()]
        agent = text_of(values.pop(0)) if isinstance(values[0], str | bytes) else ""
        if isinstance(values[0], nixlXferDList):
            kind, rows = values[0].getType(), values[0].rows
        else:
            kind, rows = nixl_mem_t(values[0]), _expanded(values[1])
        is_local = agent in ("", "NIXL_INIT_AGENT", self.name)
        if agent in ("", "NIXL_INIT_AGENT"):
            agent = ""
        regions = self._local if is_local else self._remote(agent).regions
        self._check(regions, "local" if is_local else "remote", kind, rows)
        number = next(self._numbers)
        self._sides[number] = _Side(agent, is_local, kind, rows)
        return number

    def releasedDlistH(self, handle: int) -> nixl_status_t:  # noqa: N802
        """Forget a prepared list; idempotent."""
        self._sides.pop(handle, None)
        return _SUCCESS

    def makeXferReq(  # noqa: N802
        self, operation: nixl_xfer_op_t, local_side: int, local_indices: Any, remote_side: int,
        remote_indices: Any, notif_msg: bytes | str = b"", backend: Sequence[int] = (),
        skip_desc_merge: bool = False,
    ) -> int:  # fmt: skip
        """Return the handle of a transfer between descriptors of two prepared lists."""
        local, remote = self._sides.get(local_side), self._sides.get(remote_side)
        if local is None or remote is None:
            raise nixlInvalidParamError("a prepared list was released")
        if not local.is_local or not remote.agent:
            raise nixlInvalidParamError("local_side must be a local list, remote_side a remote one")
        mine = _indices("local_indices", local_indices)
        theirs = _indices("remote_indices", remote_indices)
        return self._add(operation, remote.agent, local.rows, remote.rows, notif_msg, mine, theirs)

    def createXferReq(  # noqa: N802
        self, operation: nixl_xfer_op_t, local_descs: nixlXferDList, remote_descs: nixlXferDList,
        remote_agent: str | bytes, notif_msg: bytes | str = b"", backend: Sequence[int] = (),
    ) -> int:  # fmt: skip
        """Return the handle of a transfer between two lists of descriptors."""
        agent, local, remote = text_of(remote_agent), local_descs.rows, remote_descs.rows
        regions = self._local if agent == self.name else self._remote(agent).regions
        self._check(self._local, "local", local_descs.getType(), local)
        self._check(regions, "remote", remote_descs.getType(), remote)
        return self._add(operation, agent, local, remote, notif_msg)

    def _add(
        self, operation: nixl_xfer_op_t, agent: str, local: Rows, remote: Rows,
        message: bytes | str, mine: Column | None = None, theirs: Column | None = None,
    ) -> int:  # fmt: skip
        """Add a transfer between rows of two lists, all of them or the chosen ones."""
        counts = [len(local if mine is None else mine), len(remote if theirs is None else theirs)]
        if counts[0] != counts[1] or not counts[0]:
            raise nixlInvalidParamError(
                f"{counts[0]} local and {counts[1]} remote descriptors; a transfer has as many "
                "of both, and at least one"
            )
        here, there, sizes, nbytes, wrong = choose(
            local.reshape(-1), remote.reshape(-1), mine, theirs
        )
        if wrong >= 0:
            raise _unlike(wrong, local, remote, mine, theirs)
        written = here if operation is nixl_xfer_op_t.NIXL_READ else there
        if len(sizes) > 1 and (clash := first_overlap(written, sizes)) is not None:
            texts = [span_text(int(written[at]), int(sizes[at])) for at in sorted(clash)]
            raise self._logged("transfer", ValueError(f"{' and '.join(texts)} overlap"))
        number = next(self._numbers)
        self._transfers[number] = _Transfer(
            agent, operation, here, there, sizes, nbytes, bytes_of(message)
        )
        return number

    def postXferReq(self, reqh: int, notif_msg: bytes | str = b"") -> nixl_status_t:  # noqa: N802
        """Begin a transfer, or begin it again after its end."""
        transfer = self._transfer(reqh)
        if transfer.status is _IN_PROGRESS and self.getXferStatus(reqh) is _IN_PROGRESS:
            raise nixlRepostActiveError(f"transfer {reqh} is still in flight")
        if notif_msg:
            transfer.message = bytes_of(notif_msg)
        transfer.began, transfer.error, transfer.request = monotonic(), None, None
        try:
            self._post(transfer)
        except _REFUSALS as error:
            self._failed(transfer, error)
            found = self._logged(f"{transfer.text} with {transfer.agent}", error)
            if not isinstance(found, nixlBackendError):
                raise found from error
        transfer.posted = monotonic()
        return _SUCCESS if transfer.status is _SUCCESS else self.getXferStatus(reqh)

    def _post(self, transfer: _Transfer) -> None:
        datadist, agent = self.engine.datadist, transfer.agent
        is_loop = agent == self.name
        cluster = datadist.cluster_id if is_loop else self._reached(agent)
        ranges = transfer.ranges
        if ranges is None or ranges.cluster_id != cluster:
            direction: Literal["pull", "push"] = "push"
            if transfer.operation is nixl_xfer_op_t.NIXL_READ:
                direction = "pull"
            columns = transfer.local, transfer.remote, transfer.sizes
            ranges = transfer.ranges = AddressRanges(cluster, *columns, direction)
        frames: list[bytes] = []
        if transfer.message and not is_loop:
            frames = self.engine.connections.frames(self.name.encode(), transfer.message)
            for frame in frames[:-1]:
                datadist.notify(cluster, frame)
        notify = frames[-1] if frames else None
        task = self.engine.begin(ranges, transfer.nbytes, notify=notify)
        if task is None:
            self._succeeded(transfer)
            return
        transfer.request = Request(task, ranges, agent, transfer.text)
        transfer.status = _IN_PROGRESS

    def getXferStatus(self, reqh: int) -> nixl_status_t:  # noqa: N802
        """Return the state of a transfer. The log says why it is NIXL_ERR_BACKEND.

        Raises:
            nixlRemoteDisconnectError: it failed, as the remote agent is gone.
            nixlNotPostedError, nixlInvalidParamError: it was not posted, or was released.
        """
        transfer = self._transfer(reqh)
        if transfer.status is None:
            raise nixlNotPostedError(f"transfer {reqh} was not posted")
        request = transfer.request
        if request is not None and transfer.status is _IN_PROGRESS and request.has_ended():
            error = request.error(_log, reqh)
            if error is None:
                self._succeeded(transfer)
            else:
                self._failed(transfer, error)
        if transfer.error is not None and transfer.error.status_code in _GONE:
            raise nixlRemoteDisconnectError(str(transfer.error))
        return transfer.status

    def _succeeded(self, transfer: _Transfer) -> None:
        if transfer.message and transfer.agent == self.name:
            self._looped.append(transfer.message)
        transfer.ended = monotonic()
        transfer.request, transfer.status = None, _SUCCESS

    def _failed(self, transfer: _Transfer, error: BaseException) -> None:
        transfer.request, transfer.status = None, nixl_status_t.NIXL_ERR_BACKEND
        transfer.error = error if isinstance(error, LLMException) else LLMException(str(error))

    def releaseXferReq(self, reqh: int) -> nixl_status_t:  # noqa: N802
        """Stop and forget a transfer; on return none of its bytes moves. Idempotent."""
        transfer = self._transfers.pop(reqh, None)
        if transfer is not None and transfer.request is not None:
            transfer.request.task.cancel(LLMException("the transfer was released"))
        return _SUCCESS

    def _transfer(self, reqh: int) -> _Transfer:
        transfer = self._transfers.get(reqh)
        if transfer is None:
            raise nixlInvalidParamError(f"transfer {reqh} does not exist, or was released")
        return transfer

    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:  # noqa: N802
        """Return the times of a transfer that is done."""
        transfer = self._transfer(reqh)
        if not self._config.captureTelemetry:
            raise nixlNoTelemetryError("captureTelemetry is False")
        if transfer.status is not _SUCCESS:
            raise nixlNotPostedError(f"transfer {reqh} is not done")
        post, whole = (at - transfer.began for at in (transfer.posted, transfer.ended))
        return nixlXferTelemetry(
            startTime=int(transfer.began * 1e6), postDuration=int(post * 1e6),
            xferDuration=int(max(post, whole) * 1e6), totalBytes=transfer.nbytes,
            descCount=len(transfer.sizes),
        )  # fmt: skip

    def estimateXferCost(self, req_handle: int) -> tuple[int, int, int]:  # noqa: N802
        """Return duration, error and method of an estimate; kvplan has none."""
        self._transfer(req_handle)
        return 0, 0, -1

    def queryXferBackend(self, reqh: int) -> int:  # noqa: N802
        """Return the backend of a transfer."""
        self._transfer(reqh)
        return next(iter(self._backends.values()))

    def prepMemView(self, dlist: Any, backends: Sequence[int] = ()) -> int:  # noqa: N802
        """Refuse: views are of GPU kernels."""
        raise nixlBackendError("views of memory are for kernels of GPUs; kvplan has none")

    def releaseMemView(self, mvh: int) -> None:  # noqa: N802
        """Release a view; none exists."""

    # Notifications.

    def genNotif(  # noqa: N802
        self, remote_agent: str | bytes, msg: bytes | str, backends: Sequence[int] = ()
    ) -> nixl_status_t:
        """Send a message; on return the remote agent has it."""
        agent, message = text_of(remote_agent), bytes_of(msg)
        if agent == self.name:
            self._looped.append(message)
            return _SUCCESS
        self._remote(agent)
        try:
            self._linked(agent)
            self.engine.connections.notify(agent, self.name.encode(), message, _CONNECT_MS)
        except _REFUSALS as error:
            raise self._logged(f"send_notif to {agent}", error) from error
        return _SUCCESS

    def getNotifs(  # noqa: N802
        self, notif_map: dict[str, list[bytes]], backends: Sequence[int] = ()
    ) -> dict[str, list[bytes]]:
        """Return `notif_map` with the messages that have arrived since the last call."""
        found = {name: list(messages) for name, messages in notif_map.items()}
        for message in self.engine.connections.take_messages():
            name = message.name.decode(errors="replace")
            found.setdefault(name, []).append(message.body)
        looped, self._looped = self._looped, []
        if looped:
            found.setdefault(self.name, []).extend(looped)
        return found

    def _check(self, regions: Regions, side: str, kind: nixl_mem_t, rows: Rows) -> None:
        if not len(rows):
            raise nixlNotFoundError(f"the {side} list is empty")
        try:
            regions.check(side, kind, rows)
        except LLMException as error:
            _log.warning("agent %s: %s: %s", self.name, kind.name, error)
            raise nixlNotFoundError(str(error)) from None

    def _logged(self, call: str, error: BaseException) -> Exception:
        """Log why a call fails, and return its exception."""
        _log.warning("agent %s: %s: %s", self.name, call, error, stacklevel=3)
        kind: type[Exception] = nixlBackendError
        if isinstance(error, LLMException) and error.status_code in _GONE:
            kind = nixlRemoteDisconnectError
        elif isinstance(error, ValueError):
            kind = nixlInvalidParamError
        return kind(str(error))


def text_of(name: str | bytes) -> str:
    """Return the name of an agent, which programs also give as bytes."""
    return name.decode() if isinstance(name, bytes) else name


def bytes_of(message: str | bytes) -> bytes:
    """Return a message, which programs also give as text."""
    return message.encode() if isinstance(message, str) else bytes(message)


def _regions(descs: nixlRegDList) -> list[Region]:
    kind = int(descs.getType())
    return [(kind, address, size, device) for address, size, device in descs.rows.tolist()]


def _region_text(region: Region) -> str:
    return f"{nixl_mem_t(region[0]).name} {span_text(*region[1:3])} of device {region[3]}"


def _expanded(array: Any) -> Rows:
    """Return rows of an array with 3 columns, or with a stride and a count for each row."""
    if array.ndim != 2 or array.shape[1] not in (3, 5):
        raise TypeError(f"an array of shape {array.shape} must have 3 or 5 columns")
    rows = rows_of_array(array[:, :3])
    if array.shape[1] == 3:
        return rows
    strides, counts = (array[:, column].astype(np.uint64) for column in (3, 4))
    if not counts.sum() <= 1 << 28:
        raise nixlInvalidParamError(f"the counts have a sum of {counts.sum()}, above 2**28")
    return pieces_of(np.column_stack((rows, strides, counts)))


def _indices(name: str, indices: Any) -> Column:
    """Return a list or an array of indices; a negative one becomes a large one."""
    chosen = np.asarray(indices, None if len(indices) else np.int64)
    if chosen.ndim != 1:
        raise ValueError(f"{name} has {chosen.ndim} dimensions; it must have 1")
    return np.ascontiguousarray(chosen, np.int64).view(np.uint64)


def _unlike(
    at: int, local: Rows, remote: Rows, mine: Column | None, theirs: Column | None
) -> nixlInvalidParamError:
    """Return the error of a choice whose row does not exist, or has another size there."""
    a, b = (at if chosen is None else int(chosen[at]) for chosen in (mine, theirs))
    for name, index, rows in (("local_indices", a, local), ("remote_indices", b, remote)):
        if index >= len(rows):
            given = index - (1 << 64) * (index >> 63)
            return nixlInvalidParamError(f"{name}[{at}]={given} must be in [0, {len(rows)})")
    return nixlInvalidParamError(
        f"descriptor {at} has {local[a, 1]} bytes here and {remote[b, 1]} there"
    )
