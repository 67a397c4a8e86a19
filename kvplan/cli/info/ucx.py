"""Looks at UCX: which library, what it finds here, and whether bytes really move over it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvnative._backend import NativeError
from kvplan.execution.transfers import Transfers
from kvplan.planning import plan_pull_blocks, plan_push_blocks
from kvplan.status import LLMException
from kvplan.transport.ucx.library import OVERRIDE, find, places, why_no_rdma
from kvplan.transport.ucx.metadata import Metadata
from kvplan.types import CacheDesc, DataType

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvnative._host import Arena
    from kvplan.transport.ucx.link import UcxLink
    from kvplan.transport.ucx.transport import UcxTransport

_DESC: Final = CacheDesc(num_tensors=2, shape=(8, 32 << 10), data_type=DataType.DT_UINT8)
_PULLED: Final = ([0, 2, 5, 7], [6, 1, 3, 0])  # blocks there, and where they go here
_PUSHED: Final = ([6, 1, 3, 0], [4, 6, 1, 3])
_TIMEOUT_MS: Final = 10_000
_EVERYTHING: Final = {"TLS": "^tcp", "NET_DEVICES": "all"}
_ANY_LIBRARY: Final = ""


def look(note: Callable[..., None]) -> None:
    """Tell which library there is, what it was built with, what it finds and what is missing.

    Raises:
        LLMException, NativeError: what cannot be had, and why.
    """
    note(step="looking for UCX", ucx={"places": _places(), "environment": _environment()})
    found = find()
    note(
        step=f"loading UCX ({found.path})",
        ucx={
            "library": found.path,
            "source": found.source,
            "modules": _modules(found.path),
            "missing_for_rdma": _missing_for_rdma(found.path),
        },
    )
    from kvnative._ucx import UcxLibrary, UcxWorker

    library = UcxLibrary.load(found.path)
    version = ".".join(map(str, library.version))
    note(step="asking UCX what it finds", ucx={"library": library.path, "version": version})
    worker = UcxWorker(library, settings=_EVERYTHING, name="kvplan info")
    try:
        note(ucx={"finds": worker.transports.split()})
    finally:
        worker.close()


def look_at_transport(note: Callable[..., None], ours: UcxTransport, theirs: UcxTransport) -> None:
    """Tell how an engine's bytes would move, and move some between two ends of this process.

    Raises:
        LLMException: they cannot be moved, and why.
    """
    over = Metadata.from_bytes(ours.metadata(())).over
    note(step="trying a copy over UCX", ucx={"over": over.split()})
    tried = _try(ours, theirs)
    note(ucx={"copy": tried})
    if not tried["works"]:
        raise LLMException(f"a copy was tried, and failed: {tried['why_not']}")


def _places() -> list[dict[str, object]]:
    return [
        {"path": it.path, "origin": it.source, "has": [str(it.library)] if it.library else []}
        for it in places()
    ]


def _environment() -> dict[str, str]:
    """What UCX reads, or decides which is loaded."""
    names = (it for it in sorted(os.environ) if it.startswith("UCX_") or it == OVERRIDE)
    return {it: os.environ[it] for it in names}


def _modules(library: str) -> list[str]:
    """What lies beside the library: "ib" (verbs), "cma"; shared memory is in it."""
    files = Path(library).resolve().parent.glob("ucx/libuct_*.so")
    return sorted(it.stem.removeprefix("libuct_") for it in files)


def _missing_for_rdma(library: str) -> list[str]:
    """All of it: `why_no_rdma` ends with the first."""
    host = why_no_rdma(_ANY_LIBRARY)
    verbs = (
        ""
        if "ib" in _modules(library)
        else (
            "the library is built without verbs, as the wheel is: for RDMA install the system's "
            "UCX, or that of MLNX_OFED"
        )
    )
    return [it for it in (host, verbs) if it]


def _try(ours: UcxTransport, theirs: UcxTransport) -> dict[str, object]:
    """Pull blocks and push them back."""
    way = ""
    try:
        with ExitStack() as stack:
            arena = theirs.allocate(_DESC.nbytes)
            registration = theirs.register(arena)
            stack.callback(theirs.deregister, registration)
            link = ours.connect(theirs.metadata(), timeout_ms=_TIMEOUT_MS)
            stack.callback(link.close)
            way = link.way
            fault = _there_and_back(link, arena)
    except (LLMException, NativeError, MemoryError) as error:
        fault = str(error.args[0]) if error.args else type(error).__name__
    return {"way": way, "works": not fault, "why_not": fault}


def _there_and_back(link: UcxLink, arena: Arena) -> str:
    """What is wrong with what came; empty: nothing."""
    there = _tensors(np.frombuffer(memoryview(arena), np.uint8))
    here = _tensors(np.zeros(_DESC.nbytes, np.uint8))
    there[:] = np.random.default_rng(7).integers(1, 256, there.shape, np.uint8)
    expected = there.copy()
    addresses = [int(it.ctypes.data) for it in there]
    remote = link.memory(addresses, _DESC.tensor_nbytes, writable=True)
    with Transfers(threads=1) as transfers:
        pull = plan_pull_blocks(_DESC, _DESC, *_PULLED)
        transfers.execute(pull, remote, list(here), timeout_ms=_TIMEOUT_MS)
        push = plan_push_blocks(_DESC, _DESC, *_PUSHED)
        transfers.execute(push, list(here), remote, timeout_ms=_TIMEOUT_MS)
    pulled = expected[:, _PULLED[0]]
    if not np.array_equal(here[:, _PULLED[1]], pulled):
        return f"blocks {_PULLED[0]} were pulled wrong"
    expected[:, _PUSHED[1]] = pulled
    return "" if np.array_equal(there, expected) else f"blocks {_PUSHED[1]} were pushed wrong"


def _tensors(whole: NDArray[np.uint8]) -> NDArray[Any]:
    return whole.reshape(_DESC.num_tensors, *_DESC.shape)
