"""The calls of NIXL and of Mooncake's transfer engine that matter, and what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Final

import numpy as np

from kvplan.observe.observer import Observer, as_is, peer_number
from kvplan.observe.plans import Numbers

_OWN_NAMES: Final = ("", "NIXL_INIT_AGENT")
_Arguments = tuple[Any, ...]
_Named = Mapping[str, Any]


def _argument(args: _Arguments, kwargs: _Named, index: int, name: str, default: Any = None) -> Any:
    """Return an argument by its position, without `self`, or its name."""
    return args[index + 1] if len(args) > index + 1 else kwargs.get(name, default)


def ranges_of(given: Any) -> tuple[Numbers, list[str]]:
    """Return (address, nbytes) of each entry, and its name, of any form that NIXL takes."""
    if isinstance(given, np.ndarray):
        return np.array(given[:, :2], np.int64), [""] * len(given)
    if hasattr(given, "descCount"):
        given = [given[index] for index in range(given.descCount())]
    elif hasattr(given, "data_ptr"):
        given = [given]
    found, names = [], []
    for entry in given:
        if hasattr(entry, "data_ptr"):
            found.append((entry.data_ptr(), entry.numel() * entry.element_size()))
            names.append("")
        else:
            found.append((entry[0], entry[1]))
            text = entry[3] if len(entry) > 3 else ""
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            names.append(text if text.isprintable() else "")
    return np.array(found, np.int64).reshape(-1, 2), names


def wrap_nixl(module: ModuleType, observer: Observer) -> None:
    """Observe the class `nixl_agent` of a module."""
    agent, saw = module.nixl_agent, observer.saw

    def began(
        args: _Arguments, kwargs: _Named, _: float, __: float, ___: Any, error: object
    ) -> None:
        if error is None:
            observer.begin(args[0], str(_argument(args, kwargs, 0, "agent_name")), "nixl")

    def registered(
        args: _Arguments, kwargs: _Named, at: float, _: float, __: Any, error: object
    ) -> None:
        if error is None:
            saw(args[0], "register", at, *ranges_of(_argument(args, kwargs, 0, "reg_list")))

    def deregistered(
        args: _Arguments, kwargs: _Named, at: float, _: float, __: Any, error: object
    ) -> None:
        if error is None:
            saw(args[0], "deregister", at, ranges_of(_argument(args, kwargs, 0, "dereg_list"))[0])

    def prepared(
        args: _Arguments, kwargs: _Named, at: float, _: float, made: Any, error: object
    ) -> None:
        if error is None:
            name = str(_argument(args, kwargs, 0, "agent_name"))
            own = name in (*_OWN_NAMES, args[0].name)
            ranges = ranges_of(_argument(args, kwargs, 1, "xfer_list"))[0]
            saw(args[0], "prepare", at, _key(made), ranges, None if own else peer_number(name))

    def made(
        args: _Arguments, kwargs: _Named, at: float, _: float, handle: Any, error: object
    ) -> None:
        if error is not None:
            return
        pick = partial(_argument, args, kwargs)
        saw(
            args[0], "make", at, _key(handle), pick(0, "operation"),
            _key(pick(1, "local_xfer_side")), pick(2, "local_indices"),
            _key(pick(3, "remote_xfer_side")), pick(4, "remote_indices"),
            pick(5, "notif_msg", b""),
        )  # fmt: skip

    def initialized(
        args: _Arguments, kwargs: _Named, at: float, _: float, handle: Any, error: object
    ) -> None:
        if error is not None:
            return
        pick = partial(_argument, args, kwargs)
        here, there = (
            ranges_of(pick(index, name))[0]
            for index, name in ((1, "local_descs"), (2, "remote_descs"))
        )
        peer = peer_number(str(pick(3, "remote_agent")))
        saw(
            args[0], "initialize", at, _key(handle), pick(0, "operation"), here, there, peer,
            pick(4, "notif_msg", b""),
        )  # fmt: skip

    def posted(
        args: _Arguments, kwargs: _Named, begin: float, end: float, state: Any, error: object
    ) -> None:
        handle = _key(_argument(args, kwargs, 0, "handle"))
        saw(args[0], "post", begin, handle, _argument(args, kwargs, 1, "notif_msg", b""))
        stands(args, kwargs, begin, end, state, error)

    def stands(
        args: _Arguments, kwargs: _Named, _: float, end: float, state: Any, error: object
    ) -> None:
        if error is None and state == "PROC":
            return
        handle = _key(_argument(args, kwargs, 0, "handle"))
        saw(args[0], "end", end, handle, state == "DONE", str(error or "")
            or ("" if state == "DONE" else "ERR"))  # fmt: skip

    def released(
        args: _Arguments, kwargs: _Named, at: float, _: float, __: Any, error: object
    ) -> None:
        saw(args[0], "release", at, _key(_argument(args, kwargs, 0, "handle")))

    def notified(
        args: _Arguments, kwargs: _Named, at: float, _: float, __: Any, error: object
    ) -> None:
        peer = peer_number(str(_argument(args, kwargs, 0, "remote_agent_name")))
        saw(args[0], "notify", at, peer, _argument(args, kwargs, 1, "notif_msg", b""))

    rows: dict[str, tuple[Callable[..., None], Callable[[Any], Any] | None]] = {
        "__init__": (began, None),
        "register_memory": (registered, None),
        "deregister_memory": (deregistered, None),
        "prep_xfer_dlist": (prepared, None),
        "make_prepped_xfer": (made, _kept),
        "initialize_xfer": (initialized, None),
        "transfer": (posted, as_is),
        "check_xfer_state": (stands, as_is),
        "release_xfer_handle": (released, as_is),
        "send_notif": (notified, as_is),
    }
    for name, (after, kept) in rows.items():
        observer.wrap(agent, name, after, kept)


def _key(handle: Any) -> int:
    """Return what stands for a handle: the handle of versions where it is a number, or its id."""
    return handle if isinstance(handle, int) else id(handle)


def _kept(args: Any) -> Any:
    """Return arguments with the lists and arrays of indices as they are now."""
    return [its.copy() if isinstance(its, list | np.ndarray) else its for its in args]


def wrap_mooncake(module: ModuleType, observer: Observer) -> None:
    """Observe the class `TransferEngine` of a module."""
    engine, saw = module.TransferEngine, observer.saw

    def began(
        args: _Arguments, kwargs: _Named, _: float, __: float, code: Any, error: object
    ) -> None:
        if error is None and code == 0:
            name = str(_argument(args, kwargs, 0, "local_hostname"))
            port = getattr(args[0], "get_rpc_port", lambda: 0)()
            name = name if ":" in name or not port else f"{name}:{port}"
            observer.begin(args[0], name, "mooncake")

    def registered(
        args: _Arguments, kwargs: _Named, at: float, _: float, code: Any, __: object
    ) -> None:
        if code == 0:
            entries = np.array([[args[1], args[2]]], np.int64)
            saw(args[0], "register", at, entries, [""])

    def registered_all(
        args: _Arguments, kwargs: _Named, at: float, _: float, code: Any, __: object
    ) -> None:
        if code == 0:
            entries = np.array([args[1], args[2]], np.int64).T
            saw(args[0], "register", at, entries, [""] * len(entries))

    def moved(
        names: tuple[str, ...], reads: bool, args: _Arguments, kwargs: _Named, begin: float,
        end: float, code: Any, error: object,
    ) -> None:  # fmt: skip
        peer, here, there, nbytes = (
            _argument(args, kwargs, index, name) for index, name in enumerate(names)
        )
        columns = (np.atleast_1d(np.array(its, np.int64)) for its in (here, there, nbytes))
        saw(args[0], "move", begin, id(args), reads, peer_number(str(peer)), *columns)
        text = str(error or "") or ("" if code == 0 else f"ret: {code}")
        saw(args[0], "end", end, id(args), code == 0, text)
        saw(args[0], "release", end, id(args))

    for name in ("initialize", "initialize_ext"):
        observer.wrap(engine, name, began)
    observer.wrap(engine, "register_memory", registered)
    observer.wrap(engine, "batch_register_memory", registered_all)
    for prefix, names in (
        ("transfer_sync", ("target_hostname", "buffer", "peer_buffer_address", "length")),
        ("batch_transfer_sync", ("target_hostname", "buffers", "peer_buffer_addresses", "lengths")),
    ):
        for way in ("read", "write"):
            observer.wrap(engine, f"{prefix}_{way}", partial(moved, names, way == "read"), _kept)
