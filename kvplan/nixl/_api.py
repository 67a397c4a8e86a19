"""The names of NIXL's Python interface: `nixl_agent` over `nixlAgent`."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, Final, TypeVar

import numpy as np

from kvnative._signals import Mutex, signals_deferred
from kvplan.nixl import _bindings as nixlBind  # noqa: N812 - as programs know it
from kvplan.nixl.agent import text_of
from kvplan.nixl.lists import DescList, nixlRegDList, nixlRemoteDList, nixlXferDList
from kvplan.nixl.transfers import nixlAgent
from kvplan.nixl.values import DEFAULT_COMM_PORT as DEFAULT_COMM_PORT  # noqa: PLC0414 - exported
from kvplan.nixl.values import (
    nixl_mem_t,
    nixl_status_t,
    nixl_xfer_op_t,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
    nixlXferTelemetry,
)
from kvplan.nixl.values import nixl_thread_sync_t as _sync
from kvplan.system.logs import Log
from kvplan.validation import as_bytes, check_type

_log = Log("kvplan.nixl")

nixl_backend_handle = int

_MEMS: Final = {
    "DRAM": nixl_mem_t.DRAM_SEG, "VRAM": nixl_mem_t.VRAM_SEG, "FILE": nixl_mem_t.FILE_SEG,
    "BLOCK": nixl_mem_t.BLK_SEG, "OBJ": nixl_mem_t.OBJ_SEG,
    "cpu": nixl_mem_t.DRAM_SEG, "cuda": nixl_mem_t.VRAM_SEG,
}  # fmt: skip
_OPS: Final = {"WRITE": nixl_xfer_op_t.NIXL_WRITE, "READ": nixl_xfer_op_t.NIXL_READ}
_STATES: Final = {nixl_status_t.NIXL_SUCCESS: "DONE", nixl_status_t.NIXL_IN_PROG: "PROC"}
_Backends = Sequence[str]


class nixl_thread_sync_t(Enum):  # noqa: N801 - a name of the original, as those below
    """The threads that may use an agent."""

    NIXL_THREAD_SYNC_NONE = _sync.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = _sync.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = _sync.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = _sync.NIXL_THREAD_SYNC_DEFAULT


class nixl_agent_config:  # noqa: N801
    """Settings of a `nixl_agent`."""

    def __init__(
        self, enable_prog_thread: bool = True, enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT, capture_telemetry: bool = False, num_threads: int = 0,
        backends: list[str] = ["UCX"],  # noqa: B006 - the signature of the original
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:  # fmt: skip
        self.backends = backends
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class _Handle:
    """A handle of an agent. Freeing this object releases the handle."""

    def __init__(self, agent: nixlAgent, value: int) -> None:
        self._agent, self._handle, self._released = agent, value, False

    def _release(self) -> None: ...

    def release(self) -> None:
        """Release the transfer or list of the handle; idempotent."""
        if not self._released:
            self._released = True
            self._release()

    def __del__(self, ignoring: Any = suppress) -> None:  # a global may be gone at exit
        with ignoring(Exception):
            self.release()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._handle:#x}, released={self._released})"


class nixl_prepped_dlist_handle(_Handle):  # noqa: N801
    """A prepared list."""

    def _release(self) -> None:
        self._agent.releasedDlistH(self._handle)


class nixl_xfer_handle(_Handle):  # noqa: N801
    """A transfer. After `release` none of its bytes moves."""

    def _release(self) -> None:
        self._agent.releaseXferReq(self._handle)


class nixl_agent:  # noqa: N801
    """An agent of NIXL's Python interface. Backends "UCX" and "KVPLAN" are both kvplan's.

    Every method raises exceptions of `_bindings`, such as nixlInvalidParamError for a handle of
    another agent; for impossible arguments also TypeError, ValueError, KeyError, IndexError or
    RuntimeError, as the original does. The constructor raises LLMException for invalid options, and
    OSError if the port of the listening thread is in use.

    A transfer that fails after it was posted has the state "ERR"; if the remote agent is gone,
    `check_xfer_state` raises nixlRemoteDisconnectError.
    """

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
    ) -> None:  # fmt: skip
        conf = nixl_conf or nixl_agent_config()
        self.agent: nixlAgent = nixlAgent(
            agent_name,
            nixlBind.nixlAgentConfig(
                useProgThread=conf.enable_pthread, useListenThread=conf.enable_listen,
                listenPort=conf.port, captureTelemetry=conf.capture_telemetry,
            ),
        )  # fmt: skip
        self.name: str = self.agent.name
        self.notifs: dict[str, list[bytes]] = {}
        self._reading = Mutex()  # held by calls that change `notifs`
        self.backends: dict[str, int] = {}
        self.plugin_list: list[str] = self.agent.getAvailPlugins()
        self.nixl_mems: dict[str, nixl_mem_t] = dict(_MEMS)
        self.nixl_ops: dict[str, nixl_xfer_op_t] = dict(_OPS)
        for backend in self.plugin_list if instantiate_all else conf.backends:
            if backend in self.plugin_list:
                self.create_backend(backend)
            else:
                _log.warning("agent %s: backend %s does not exist here", agent_name, backend)

    def get_plugin_list(self) -> list[str]:
        """Return the names of the plugins."""
        return list(self.plugin_list)

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Return the kinds of memory of a plugin."""
        return [kind.name for kind in self.agent.getPluginParams(backend)[1]]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Return the properties of a plugin: kvplan's version, and the transports of its links."""
        return self.agent.getPluginParams(backend)[0]

    get_backend_mem_types, get_backend_params = get_plugin_mem_types, get_plugin_params

    def create_backend(self, backend: str, initParams: Mapping[str, str] = {}) -> None:  # noqa: N803
        """Make a backend of a plugin."""
        self.backends[backend] = self.agent.createBackend(backend, initParams)

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: _Backends = ()
    ) -> nixlRegDList:
        """Let transfers use memory, and return the list for `deregister_memory`."""
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is None:
            raise TypeError(f"reg_list={type(reg_list).__name__} is not memory")
        self.agent.registerMem(descs, self._handles(backends))
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: _Backends = ()) -> None:
        """Undo one registration of memory; after the last one no transfer uses the memory."""
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """Refuse: no backend here has files or objects."""
        if backend not in self.backends:
            raise ValueError(f"Backend {backend!r} not found. Available: {list(self.backends)}")
        return self.agent.queryMem(reg_list, self.backends[backend])

    def make_connection(self, remote_agent: str | bytes, backends: _Backends = ()) -> None:
        """Link with a remote agent, unless it is linked."""
        self.agent.makeConnection(text_of("remote_agent", remote_agent), self._handles(backends))

    def prep_xfer_dlist(
        self, agent_name: str | bytes, xfer_list: Any, mem_type: str | None = None,
        backends: _Backends = (),
    ) -> nixl_prepped_dlist_handle:  # fmt: skip
        """Find descriptors in registered memory of an agent, for `make_prepped_xfer`."""
        agent_name = text_of("agent_name", agent_name)
        if isinstance(xfer_list, np.ndarray) and mem_type is not None:
            number = self.agent.prepXferDlist(agent_name, _MEMS[mem_type], xfer_list)
        else:
            descs = self.get_xfer_descs(xfer_list, mem_type)
            if descs is None:
                raise TypeError(f"xfer_list={type(xfer_list).__name__} has no descriptors")
            number = self.agent.prepXferDlist(agent_name, descs)
        return nixl_prepped_dlist_handle(self.agent, number)

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: nixl_prepped_dlist_handle, local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle, remote_indices: Any, notif_msg: bytes = b"",
        backends: _Backends = (), skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:  # fmt: skip
        """Return a transfer between descriptors of two prepared lists, chosen by indices."""
        number = self.agent.makeXferReq(
            _OPS[operation],
            self._number("local_xfer_side", local_xfer_side, nixl_prepped_dlist_handle),
            local_indices,
            self._number("remote_xfer_side", remote_xfer_side, nixl_prepped_dlist_handle),
            remote_indices, notif_msg, self._handles(backends), skip_desc_merge,
        )  # fmt: skip
        return nixl_xfer_handle(self.agent, number)

    def initialize_xfer(
        self, operation: str, local_descs: nixlXferDList, remote_descs: nixlXferDList,
        remote_agent: str | bytes, notif_msg: bytes = b"", backends: _Backends = (),
    ) -> nixl_xfer_handle:  # fmt: skip
        """Return a transfer between two lists of descriptors."""
        number = self.agent.createXferReq(
            _OPS[operation], local_descs, remote_descs, remote_agent, notif_msg,
            self._handles(backends),
        )  # fmt: skip
        return nixl_xfer_handle(self.agent, number)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes = b"") -> str:
        """Begin a transfer, or begin it again; return its state: "DONE", "PROC" or "ERR"."""
        return _STATES.get(self.agent.postXferReq(self._number("handle", handle), notif_msg), "ERR")

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Return the state of a transfer: "DONE", "PROC" or "ERR"."""
        return _STATES.get(self.agent.getXferStatus(self._number("handle", handle)), "ERR")

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        """Return the times of a transfer that is done."""
        return self.agent.getXferTelemetry(self._number("handle", handle))

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Return duration 0, error 0 and method UNKNOWN: kvplan does not estimate."""
        duration, error, _ = self.agent.estimateXferCost(self._number("req_handle", req_handle))
        return duration, error, "UNKNOWN"

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """Return the name of the backend of a transfer."""
        found = self.agent.queryXferBackend(self._number("handle", handle))
        return next(name for name, number in self.backends.items() if number == found)

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Stop and forget a transfer; on return none of its bytes moves."""
        self._number("handle", handle)
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Forget a prepared list."""
        self._number("handle", handle, nixl_prepped_dlist_handle)
        handle.release()

    def prep_mem_view(self, dlist: Any, *, backends: _Backends | None = None) -> int:
        """Refuse: views of memory are for GPU kernels."""
        return self.agent.prepMemView(dlist)

    def release_mem_view(self, mvh: int) -> None:
        """Do nothing: kvplan makes no views."""
        self.agent.releaseMemView(mvh)

    def get_new_notifs(self, backends: _Backends = ()) -> dict[str, list[bytes]]:
        """Return the messages that have arrived since the last call, by agent."""
        return self.agent.getNotifs({})

    def update_notifs(self, backends: _Backends = ()) -> dict[str, list[bytes]]:
        """Add the messages that have arrived to `notifs`, and return `notifs`."""
        self.agent._check_running("update_notifs")
        with self._reading, signals_deferred:
            self.notifs = self.agent.getNotifs(self.notifs)
            return self.notifs

    def check_remote_xfer_done(
        self, remote_agent_name: str | bytes, lookup_tag: bytes, backends: _Backends = (),
        tag_is_prefix: bool = True,
    ) -> bool:  # fmt: skip
        """Return True if a message with this tag has arrived, and remove the message."""
        name = text_of("remote_agent_name", remote_agent_name)
        tag = as_bytes("lookup_tag", lookup_tag)
        self.agent._check_running("check_remote_xfer_done")
        with self._reading, signals_deferred:
            messages = self.update_notifs().get(name, [])
            for place, message in enumerate(messages):
                if message.startswith(tag) if tag_is_prefix else tag in message:
                    del messages[place]
                    return True
        return False

    def send_notif(
        self, remote_agent_name: str | bytes, notif_msg: bytes, backend: str | None = None
    ) -> None:
        """Send a message that belongs to no transfer."""
        name = text_of("remote_agent_name", remote_agent_name)
        self.agent.genNotif(name, as_bytes("notif_msg", notif_msg))

    def get_agent_metadata(self) -> bytes:
        """Return the metadata of this agent, for `add_remote_agent` of others."""
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: _Backends = ()
    ) -> bytes:
        """Return metadata of some registered memory."""
        return self.agent.getLocalPartialMD(descs, inc_conn_info)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Add a remote agent, link with it in the background, and return its name as bytes."""
        return self.agent.loadRemoteMD(as_bytes("metadata", metadata))

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Stop all transfers with a remote agent, and forget the agent."""
        self.agent.invalidateRemoteMD(text_of("agent", agent))

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Give the metadata to another agent's listening thread."""
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: _Backends = (),
        ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = "",
    ) -> None:  # fmt: skip
        """Give metadata of some memory to another agent's listening thread."""
        self.agent.sendLocalPartialMD(descs, inc_conn_info, (), ip_addr, port, label)

    def fetch_remote_metadata(
        self, remote_agent: str | bytes, ip_addr: str = "", port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:  # fmt: skip
        """Load an agent's metadata from its listening thread; poll with `check_remote_metadata`."""
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Make another agent forget this one, through its listening thread."""
        self.agent.invalidateLocalMD(ip_addr, port)

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        """Return True if the agent is known, and has registered the descriptors."""
        agent = text_of("agent", agent)
        try:
            empty = nixlXferDList(nixl_mem_t.DRAM_SEG)
            self.agent.checkRemoteMD(agent, empty if descs is None else descs)
        except (nixlNotFoundError, nixlRemoteDisconnectError):
            return False
        return True

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList | None:
        """Make a list of ranges from tuples (address, size, device), tensors, or an array."""
        return _list_of(nixlXferDList, 3, descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        """Make a list of memory from tuples (address, size, device, text), tensors, or an array."""
        return _list_of(nixlRegDList, 4, descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlRemoteDList | None:
        """Make a list of remote ranges from tuples (address, size, device, agent)."""
        return _list_of(nixlRemoteDList, 4, descs, mem_type)

    def get_serialized_descs(self, descs: DescList) -> bytes:
        """Return a list as bytes."""
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """Return the list of `get_serialized_descs`; refuse other classes (UnpicklingError)."""
        return _ListUnpickler(io.BytesIO(serialized_descs)).load()

    def _handles(self, backends: _Backends) -> list[int]:
        return [self.backends[name] for name in backends]

    def _number(self, name: str, handle: _Handle, kind: type[_Handle] = nixl_xfer_handle) -> int:
        """Return the number of a handle of this agent, given in the argument `name`."""
        if check_type(name, handle, kind)._agent is not self.agent:
            owner = handle._agent.name
            raise nixlInvalidParamError(f"{name}={handle} is of agent {owner!r}, not {self.name!r}")
        return handle._handle


_List = TypeVar("_List", bound=DescList)


class _ListUnpickler(pickle.Unpickler):
    """An unpickler that refuses all classes but lists of descriptors."""

    def find_class(self, module: str, name: str) -> Any:
        kinds = {"nixlXferDList": nixlXferDList, "nixlRegDList": nixlRegDList}
        if module not in ("kvplan.nixl.lists", "nixl._bindings") or name not in kinds:
            raise pickle.UnpicklingError(f"{module}.{name} is not a list of descriptors")
        return kinds[name]


def _list_of(kind: type[_List], width: int, descs: Any, mem_type: str | None) -> _List | None:
    """Return a list of this kind; log `descs` of another form, and return None."""
    if isinstance(descs, kind):
        return descs
    found = None if mem_type is None else _MEMS[mem_type]
    if hasattr(descs, "data_ptr"):
        descs = [descs]
    if descs is None:
        raise TypeError("'NoneType' object is not subscriptable")
    if isinstance(descs, list | np.ndarray) and len(descs) == 0:
        raise IndexError("list index out of range: descs is empty")
    if isinstance(descs, np.ndarray):
        if found is not None:
            return kind(found, descs)
    elif isinstance(descs, DescList | str):
        pass
    elif hasattr(descs[0], "data_ptr"):
        rows = [_tensor(tensor) for tensor in descs]
        kinds = {_MEMS["cuda" if tensor.is_cuda else "cpu"] for tensor in descs}
        if len(kinds) == 1:
            return kind(kinds.pop(), rows if width == 3 else [(*row, "") for row in rows])
    elif isinstance(descs[0], tuple) and len(descs[0]) == width and found is not None:
        return kind(found, list(descs))
    _log.error(
        "descs=%s with mem_type=%s must be tuples of %d and a mem_type, tensors of one device or "
        "an array of three columns",
        type(descs).__name__, mem_type, width,
    )  # fmt: skip
    return None


def _tensor(tensor: Any) -> tuple[int, int, int]:
    """Return address, size and device of a torch tensor."""
    if not tensor.is_contiguous():
        raise ValueError("a tensor is not contiguous; pass its storage or a copy")
    nbytes = tensor.numel() * tensor.element_size()
    return tensor.data_ptr(), nbytes, max(tensor.get_device(), 0)
