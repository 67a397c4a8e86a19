"""The observed methods of NIXL, Mooncake's transfer engine and HIXL, and their recorded values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.observe.agent import MOVE, Agent
from kvplan.observe.calls import key_of
from kvplan.observe.observer import Observer, peer_number
from kvplan.observe.plans import ranges_of

_OWN_NAMES: Final = ("", "NIXL_INIT_AGENT")
_COLUMNS: Final = ("local_addr", "remote_addr", "len")
_Arguments = tuple[Any, ...]
_Named = Mapping[str, Any]


def _argument(args: _Arguments, kwargs: _Named, index: int, name: str, default: Any = None) -> Any:
    """Return an argument by its position (not counting `self`) or its name."""
    return args[index + 1] if len(args) > index + 1 else kwargs.get(name, default)


def _name(given: str | bytes) -> str:
    """Return an agent's name, which `add_remote_agent` returns as bytes in some versions."""
    return given.decode("utf-8", "replace") if isinstance(given, bytes) else str(given)


def _is_host(given: Any, kind: str | None) -> bool:
    """Return True only if memory to register is certainly host memory."""
    if hasattr(given, "getType"):
        return "DRAM" in str(given.getType())
    tensors = [given] if hasattr(given, "data_ptr") else given
    if kind is not None and not any(hasattr(tensor, "data_ptr") for tensor in tensors[:1]):
        return kind.lower() in ("dram", "cpu")  # NIXL has the kind of tensors from the tensors
    return all(getattr(getattr(tensor, "device", None), "type", "") == "cpu" for tensor in tensors)


def wrap_nixl(module: ModuleType, observer: Observer) -> None:
    """Observe the class `nixl_agent` of a module."""
    agent, wrap = module.nixl_agent, observer.wrap

    def began(args: _Arguments, kwargs: _Named, _: Any) -> _Arguments:
        observer.begin(args[0], str(_argument(args, kwargs, 0, "agent_name")), "nixl")
        return ()

    wrap(agent, "__init__", began, None)
    wrap(agent, "register_memory", _registered, Agent.register)
    wrap(agent, "deregister_memory", _deregistered, Agent.deregister)
    wrap(agent, "prep_xfer_dlist", _prepared, Agent.prepare)
    wrap(agent, "initialize_xfer", _initialized, Agent.initialize)
    observer.wrap_made(agent, "make_prepped_xfer", Agent.make)
    observer.wrap_each(agent, "transfer", Agent.post, begins=True)
    observer.wrap_each(agent, "check_xfer_state", Agent.check, "PROC")
    observer.wrap_each(agent, "release_xfer_handle", Agent.release)
    observer.wrap_each(agent, "release_dlist_handle", Agent.forget)
    wrap(agent, "send_notif", _notified, Agent.notify)


def _registered(args: _Arguments, kwargs: _Named, _: Any) -> _Arguments:
    given = _argument(args, kwargs, 0, "reg_list")
    return *ranges_of(given), _is_host(given, _argument(args, kwargs, 1, "mem_type"))


def _deregistered(args: _Arguments, kwargs: _Named, _: Any) -> _Arguments:
    return ranges_of(_argument(args, kwargs, 0, "dereg_list"))[:1]


def _prepared(args: _Arguments, kwargs: _Named, handle: Any) -> _Arguments:
    name = _name(_argument(args, kwargs, 0, "agent_name"))
    ranges = ranges_of(_argument(args, kwargs, 1, "xfer_list"))[0]
    own = name in (*_OWN_NAMES, args[0].name)
    return key_of(handle), ranges, None if own else peer_number(name)


def _initialized(args: _Arguments, kwargs: _Named, handle: Any) -> _Arguments:
    pick = partial(_argument, args, kwargs)
    lists = (
        ranges_of(pick(index, name))[0] for index, name in ((1, "local_descs"), (2, "remote_descs"))
    )
    peer = peer_number(_name(pick(3, "remote_agent")))
    return key_of(handle), pick(0, "operation"), *lists, peer, pick(4, "notif_msg", b"")


def _notified(args: _Arguments, kwargs: _Named, _: Any) -> _Arguments:
    peer = peer_number(_name(_argument(args, kwargs, 0, "remote_agent_name")))
    return peer, _argument(args, kwargs, 1, "notif_msg", b"")


def wrap_mooncake(module: ModuleType, observer: Observer) -> None:
    """Observe the class `TransferEngine` of a module."""
    engine, wrap = module.TransferEngine, observer.wrap

    def began(args: _Arguments, kwargs: _Named, code: Any) -> _Arguments:
        if code == 0:
            name = str(_argument(args, kwargs, 0, "local_hostname"))
            port = getattr(args[0], "get_rpc_port", lambda: 0)()
            name = name if ":" in name or not port else f"{name}:{port}"
            observer.begin(args[0], name, "mooncake")
        return ()

    for name in ("initialize", "initialize_ext"):
        wrap(engine, name, began, None)
    for prefix in ("", "batch_"):
        wrap(engine, f"{prefix}register_memory", _registered_ranges, Agent.register)
        wrap(engine, f"{prefix}unregister_memory", _unregistered, Agent.deregister)
    for prefix, names in (
        ("transfer_sync", ("target_hostname", "buffer", "peer_buffer_address", "length")),
        ("batch_transfer_sync", ("target_hostname", "buffers", "peer_buffer_addresses", "lengths")),
    ):
        for way in ("read", "write"):
            moved = partial(_moved, names, way == "read")
            wrap(engine, f"{prefix}_{way}", moved, Agent.move, errors=True)


def _registered_ranges(args: _Arguments, kwargs: _Named, code: Any) -> _Arguments:
    if code != 0:
        return np.zeros((0, 2), np.int64), [], False
    addresses = _argument(args, kwargs, 0, "buffer_addr", kwargs.get("buffer_addresses"))
    sizes = _argument(args, kwargs, 1, "capacity", kwargs.get("capacities"))
    entries = np.array([np.atleast_1d(addresses), np.atleast_1d(sizes)], np.int64).T
    return entries, [""] * len(entries), False  # it may be device memory


def _unregistered(args: _Arguments, kwargs: _Named, code: Any) -> _Arguments:
    given = _argument(args, kwargs, 0, "buffer_addr", kwargs.get("buffer_addresses"))
    addresses = np.atleast_1d(np.array(given if code == 0 else [], np.int64))
    return (np.stack([addresses, np.zeros_like(addresses)], axis=1),)


def _moved(
    names: tuple[str, ...], reads: bool, args: _Arguments, kwargs: _Named, code: Any
) -> _Arguments:
    peer, *columns = (_argument(args, kwargs, index, name) for index, name in enumerate(names))
    copies = (column if isinstance(column, int) else list(column) for column in columns)
    return reads, peer_number(str(peer)), *copies, code


def wrap_hixl(module: ModuleType, observer: Observer) -> None:
    """Observe the class `Hixl` of a module."""
    engine, wrap = module.Hixl, observer.wrap
    names = WeakKeyDictionary[object, str]()  # of engines that have a recording
    regions = WeakKeyDictionary[object, dict[int, tuple[int, int]]]()  # by engine and handle

    def began(args: _Arguments, kwargs: _Named, code: Any) -> _Arguments:
        name = str(_argument(args, kwargs, 0, "local_engine"))
        if code == 0 and names.get(args[0]) != name:  # a second call has no effect
            observer.begin(args[0], name, "hixl")
            names[args[0]] = name
        return ()

    def finalized(args: _Arguments, kwargs: _Named, _: Any) -> _Arguments:
        names.pop(args[0], None)
        regions.pop(args[0], None)
        return ()

    def registered(args: _Arguments, kwargs: _Named, result: Any) -> _Arguments:
        code, handle = result
        known = regions.setdefault(args[0], {})
        memory = _argument(args, kwargs, 0, "mem_desc")
        is_host = "HOST" in str(_argument(args, kwargs, 1, "mem_type"))
        region = int(memory.addr), int(memory.len)
        is_new = code == 0 and int(handle) not in known  # a second registration has the same handle
        if is_new:
            known[int(handle)] = region
        return np.array([region] * is_new, np.int64).reshape(-1, 2), [""] * is_new, is_host

    def deregistered(args: _Arguments, kwargs: _Named, code: Any) -> _Arguments:
        known, handle = regions.get(args[0], {}), int(_argument(args, kwargs, 0, "mem_handle"))
        gone = [known.pop(handle)] if code == 0 and handle in known else []
        return (np.array(gone, np.int64).reshape(-1, 2),)

    wrap(engine, "initialize", began, None)
    wrap(engine, "finalize", finalized, None)
    wrap(engine, "register_mem", registered, Agent.register)
    wrap(engine, "deregister_mem", deregistered, Agent.deregister)
    wrap(engine, "transfer_sync", _moved_sync, Agent.move, errors=True)
    wrap(engine, "transfer_async", _moved_async, Agent.begin)
    wrap(engine, "get_transfer_status", _status_seen, Agent.finish)
    wrap(engine, "get_all_transfer_status", _statuses_seen, Agent.finish)


def _descriptors(args: _Arguments, kwargs: _Named) -> _Arguments:
    """Return the direction, the peer, the addresses and the sizes of a transfer of HIXL."""
    peer, op, copies = (
        _argument(args, kwargs, index, name)
        for index, name in enumerate(("remote_engine", "op", "op_descs"))
    )
    columns = ([getattr(copy, name) for copy in copies] for name in _COLUMNS)
    return "READ" in str(op), peer_number(str(peer)), *columns


def _moved_sync(args: _Arguments, kwargs: _Named, code: Any) -> _Arguments:
    return *_descriptors(args, kwargs), code


def _moved_async(args: _Arguments, kwargs: _Named, result: Any) -> _Arguments:
    code, request = result
    return int(request) if code == 0 else MOVE, *_descriptors(args, kwargs), code


def _status_seen(args: _Arguments, kwargs: _Named, result: Any) -> _Arguments:
    code, state = result
    return (_ended([(int(_argument(args, kwargs, 0, "req_id")), state, code)]),)


def _statuses_seen(args: _Arguments, kwargs: _Named, result: Any) -> _Arguments:
    code, results = result
    return (_ended((int(found.req), found.status, code) for found in results),)


def _ended(seen: Iterable[tuple[int, Any, Any]]) -> list[tuple[int, str, str]]:
    """Return the requests that have ended, for `Agent.finish`."""
    return [
        (request, "DONE" if state.name == "COMPLETED" else "ERR", f"{state.name}, ret: {code}")
        for request, state, code in seen
        if state.name != "WAITING"
    ]
