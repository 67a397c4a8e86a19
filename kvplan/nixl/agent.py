"""An agent's registered memory, the remote agents that it knows, and messages between them."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple
from weakref import proxy

from kvnative._signals import Mutex, signals_deferred
from kvplan.addressed.connections import MAX_NAME_NBYTES, check_message
from kvplan.addressed.connector import Connector
from kvplan.addressed.engine import REFUSALS, AddressedEngine
from kvplan.control.endpoint import Endpoint
from kvplan.engine.option_sources import configured
from kvplan.engine.options import Options
from kvplan.links.values import cluster_here
from kvplan.nixl.lists import Rows, nixlRegDList, nixlXferDList
from kvplan.nixl.metadata import Listener, Metadata, Region, Regions, ask
from kvplan.nixl.values import (
    nixl_mem_t,
    nixl_status_t,
    nixlAgentConfig,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
)
from kvplan.planning.ranges import span_text
from kvplan.status import LLMException, LLMStatusCode, link_failed
from kvplan.system.limits import start_thread
from kvplan.system.logs import Log
from kvplan.types import Placement
from kvplan.validation import as_bytes, check_type, shown

LOG: Final = Log("kvplan.nixl")

BACKENDS: Final = ("UCX", "KVPLAN")
"""Names of the one backend. Programs ask for UCX."""

GONE: Final = (LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_FAILED)
"""Statuses that mean that the remote agent is gone."""

_CONNECT_MS: Final = 10_000
_DISCONNECT_MS: Final = 1_000
_SUCCESS: Final = nixl_status_t.NIXL_SUCCESS


class _Remote(NamedTuple):
    instance: int
    address: str
    regions: Regions


class Agent:
    """An agent's memory, remote agents and messages; `nixlAgent` adds transfers.

    Any thread may call the methods.
    """

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        self.name = name = text_of("agent_name", name)
        if not 1 <= (nbytes := len(as_bytes("agent_name", name))) <= MAX_NAME_NBYTES:
            raise ValueError(f"agent_name has {nbytes} bytes; it must have 1 to {MAX_NAME_NBYTES}")
        self._config = config
        self._mutex = Mutex()
        self._remotes: dict[str, _Remote] = {}
        self._local = Regions("this agent")
        self._handles: defaultdict[Region, list[int]] = defaultdict(list)
        self._backends: dict[str, int] = {}
        self._numbers = count(1)
        self._looped: list[bytes] = []  # messages of this agent to itself
        given = {} if "listen_ip_info" in configured() else {"llm.ListenIpInfo": "127.0.0.1:0"}
        options = replace(Options.of(given), max_tensors=1)
        me = proxy(self)  # so that an agent that the program drops is freed at once
        where = partial(Agent._where, me)
        self.engine = AddressedEngine(secrets.randbits(64), options, where, LOG, is_exact=True)
        self._connector = Connector(2, 1 << 16, f"kvplan-nixl-{name}"[:60], LOG)
        self._listener: Listener | None = None
        if config.useListenThread:
            try:
                here = self.engine.datadist._running().links.endpoint  # peers may know another
                host = (here and here.host) or "127.0.0.1"  # of ipc://: this host
                self._listener = Listener(host, config.listenPort, me)
            except BaseException:  # the frames of the error keep this agent alive
                self.close()
                raise

    def close(self) -> None:
        """End transfers, links and threads. Not in NIXL, which does this when an agent is freed."""
        if self._listener is not None:
            self._listener.close()
        self._connector.stop()
        self.engine.datadist.finalize()
        self._connector.join()

    def __del__(self, ignoring: Any = suppress) -> None:  # a global may be gone at exit
        with ignoring(Exception):  # even if the constructor has failed
            self.close()

    # Plugins and backends: one, with several names.

    def getAvailPlugins(self) -> list[str]:  # noqa: N802
        """Return the names of the plugins."""
        return sorted(BACKENDS)

    def getPluginParams(self, name: str) -> tuple[dict[str, str], list[nixl_mem_t]]:  # noqa: N802
        """Return the properties of a plugin, and the kinds of memory that it moves."""
        if name not in BACKENDS:
            return {}, []
        self._check_running("get_plugin_params")
        from kvplan import __version__

        links = {link.transport or "" for link in self.engine.datadist.links()}
        real = {"kvplan": __version__, "transports": ",".join(sorted(links - {""}))}
        return real, [nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG]

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[nixl_mem_t]]:  # noqa: N802
        """Return the `getPluginParams` of a backend, by its handle."""
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
        address = self.engine.datadist.listen_address
        LOG.info("agent %s: backend %s is kvplan's (%s)", self.name, name, address)
        self._backends[name] = next(self._numbers)
        return self._backends[name]

    # Memory.

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:  # noqa: N802
        """Let transfers use memory until it is deregistered."""
        kind = check_type("descs", descs, nixlRegDList).getType()
        has_device = self.engine.datadist.device is not None
        if not self._backends or kind > nixl_mem_t.VRAM_SEG or (kind and not has_device):
            raise nixlNotFoundError(f"no backend of agent {self.name} has memory of {kind}")
        place = Placement.DEVICE if kind else Placement.HOST
        made: list[tuple[Region, int]] = []
        with self._mutex, signals_deferred:  # until all memory is known
            try:
                for region, text in zip(_regions(descs), descs.texts, strict=True):
                    name = text.decode(errors="replace")
                    handle = (
                        self.engine.register(*region[1:3], place, name=name) if region[2] else 0
                    )
                    made.append((region, handle))
            except REFUSALS as error:
                for _, handle in made:
                    self.engine.deregister(handle)
                raise self._logged("register_memory", error) from error
            self._know(made)
        return _SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:  # noqa: N802
        """Undo one registration of memory; after the last one no transfer uses the memory."""
        regions = _regions(descs)
        self._check_running("deregister_memory")
        ended: list[tuple[Region, int]] = []
        try:
            with self._mutex, signals_deferred:
                self._check_known(Counter(regions))
                ended += [(region, self._handles[region].pop()) for region in regions]
                for region in set(regions):
                    if not self._handles[region]:
                        del self._handles[region]
                        self._local.remove(region)
            for handle in filter(None, (handle for _, handle in ended)):
                self.engine.deregister(handle)
        except BaseException:  # an interrupted call can be repeated
            self._know(ended)
            raise
        return _SUCCESS

    def _check_known(self, times: Mapping[Region, int]) -> None:
        """Refuse memory that is not registered as often as `times` says."""
        for region, number in times.items():
            if len(self._handles.get(region, ())) < number:
                raise nixlNotFoundError(f"{_region_text(region)} is not registered")

    def _know(self, registered: list[tuple[Region, int]]) -> None:
        """Remember registered memory and its handles."""
        with self._mutex, signals_deferred:
            for region, handle in registered:
                self._handles[region].append(handle)
            self._local.add(region for region, _ in registered)

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
        self._check_known(dict.fromkeys(regions, 1))
        return self._metadata(regions, is_partial=True, has_address=inc_conn_info)

    def _metadata(self, regions: list[Region], *, is_partial: bool, has_address: bool) -> bytes:
        mine = self.engine.datadist
        address = (has_address and mine.listen_address) or ""
        return Metadata(self.name, mine.cluster_id, address, is_partial, regions).to_bytes()

    def loadRemoteMD(self, data: bytes | str) -> bytes:  # noqa: N802
        """Add a remote agent, link with it in the background, and return its name."""
        found = Metadata.from_bytes(as_bytes("data", data))
        name = found.name
        if name == self.name:
            raise nixlInvalidParamError(f"the metadata has this agent's own name, {name!r}")
        with self._mutex:
            known = self._remotes.get(name)
            has_restarted = known is not None and known.instance != found.instance
            if not has_restarted or not found.address:
                return self._load(found, None if has_restarted else known)
        self.invalidateRemoteMD(name)  # without the mutex: this waits for posts, which may take it
        return self.loadRemoteMD(data)

    def _load(self, found: Metadata, known: _Remote | None) -> bytes:
        name = found.name
        if known is None and not found.address:
            raise nixlNotFoundError(f"agent {name!r} is unknown, and its address is not given")
        if known is not None and found.is_partial:
            known.regions.add(found.regions)
        else:
            address = found.address or (known.address if known else "")
            regions = Regions(f"agent {name!r}", found.regions)
            self._remotes[name] = _Remote(found.instance, address, regions)
        if known is None:
            try:
                self._connector.submit(name, [None] * 4, lambda: self._connect(name))
            except REFUSALS as error:
                raise self._logged("add_remote_agent", error) from error
        return name.encode()

    def _connect(self, name: str) -> bool:
        try:
            self._linked(name)
        except (*REFUSALS, nixlNotFoundError) as error:
            LOG.warning("agent %s cannot connect with %s: %s", self.name, name, error)
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
        """Link with a remote agent, unless it is linked, and return its cluster id."""
        remote = self._remote(name)
        for _ in range(2):  # again if a process was linked after its agent had been replaced
            try:
                if (cluster := self.engine.connect(name, _CONNECT_MS)) == remote.instance:
                    return cluster
            except LLMException as error:
                if cluster_here(error) is None:
                    raise
                break
            self.engine.connections.forget(name)
        raise link_failed(f"agent {name!r} is another process now: load its metadata again")

    def makeConnection(self, name: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:  # noqa: N802
        """Link with a remote agent, unless it is linked."""
        name = text_of("name", name)
        try:
            self._linked(name)
        except REFUSALS as error:
            raise self._logged(f"make_connection with {name}", error) from error
        return _SUCCESS

    def invalidateRemoteMD(self, name: str | bytes) -> nixl_status_t:  # noqa: N802
        """Forget a remote agent and its link; idempotent."""
        name = text_of("name", name)
        if (remote := self._remotes.get(name)) is None:
            return _SUCCESS
        try:  # without the mutex, which every poll takes: a peer that is stopped does not answer
            self.engine.connections.disconnect(name, _DISCONNECT_MS)
        except (*REFUSALS, nixlNotFoundError) as error:
            LOG.info("agent %s: the link with %s was not ended: %s", self.name, name, error)
            self.engine.connections.forget(name)
        with self._mutex:
            if self._remotes.get(name) is remote:  # it was not added again meanwhile
                del self._remotes[name]
        return _SUCCESS

    def checkRemoteMD(self, name: str | bytes, descs: nixlXferDList) -> nixl_status_t:  # noqa: N802
        """Raise nixlNotFoundError unless the agent is known, and has registered the descriptors."""
        check_type("descs", descs, nixlXferDList)
        remote = self._remote(text_of("name", name))
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
        """Make another agent forget this one, through its listening thread."""
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
                LOG.warning("agent %s: %s:%s: %s", self.name, host, port, error)

        start_thread("kvplan-nixl-metadata", run)

    # Notifications.

    def genNotif(  # noqa: N802
        self, remote_agent: str | bytes, msg: bytes | str, backends: Sequence[int] = ()
    ) -> nixl_status_t:
        """Send a message; on return the remote agent has it."""
        agent, message = text_of("remote_agent", remote_agent), as_bytes("msg", msg)
        name = self.name.encode()
        try:
            if agent == self.name:
                self.engine.datadist._running()
                check_message(name, message)
                self._looped.append(message)
            else:
                self._linked(agent)
                self.engine.connections.notify(agent, name, message, _CONNECT_MS)
        except REFUSALS as error:
            raise self._logged(f"send_notif to {agent}", error) from error
        return _SUCCESS

    def getNotifs(  # noqa: N802
        self, notif_map: dict[str, list[bytes]], backends: Sequence[int] = ()
    ) -> dict[str, list[bytes]]:
        """Return a copy of `notif_map` with the messages that have arrived since the last call."""
        found = {name: list(messages) for name, messages in notif_map.items()}
        self._check_running("get_new_notifs")
        for message in self.engine.connections.take_messages():
            name = message.name.decode(errors="replace")
            found.setdefault(name, []).append(message.body)
        with self._mutex:  # in place: another thread may be about to append
            looped = [self._looped.pop(0) for _ in range(len(self._looped))]
        if looped:
            found.setdefault(self.name, []).extend(looped)
        return found

    def _check_running(self, call: str) -> None:
        """Raise nixlBackendError in a forked child, where a mutex may be held, or after `close`."""
        try:
            self.engine.datadist._running()
        except LLMException as error:
            raise self._logged(call, error) from error

    def _check(self, regions: Regions, side: str, kind: nixl_mem_t, rows: Rows) -> None:
        if not len(rows):
            raise nixlNotFoundError(f"the {side} list is empty")
        try:
            regions.check(side, kind, rows)
        except LLMException as error:
            LOG.warning("agent %s: %s: %s", self.name, kind.name, error)
            raise nixlNotFoundError(str(error)) from None

    def _logged(self, call: str, error: BaseException) -> Exception:
        """Log why a call fails, and return its exception."""
        LOG.warning("agent %s: %s: %s", self.name, call, error, stacklevel=3)
        kind: type[Exception] = nixlBackendError
        if isinstance(error, LLMException) and error.status_code in GONE:
            kind = nixlRemoteDisconnectError
        elif isinstance(error, ValueError):
            kind = nixlInvalidParamError
        return kind(str(error))


def text_of(name: str, value: str | bytes) -> str:
    """Return an agent's name, given as text or as bytes in the argument `name`."""
    if not isinstance(value, bytes):
        return check_type(name, value, str)
    with suppress(UnicodeDecodeError):
        return value.decode()
    raise ValueError(f"{name}={shown(value)} is not Unicode text")


def _regions(descs: nixlRegDList) -> list[Region]:
    kind = int(check_type("descs", descs, nixlRegDList).getType())
    return [(kind, address, size, device) for address, size, device in descs.rows.tolist()]


def _region_text(region: Region) -> str:
    return f"{nixl_mem_t(region[0]).name} {span_text(*region[1:3])} of device {region[3]}"
