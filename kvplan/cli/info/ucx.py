"""A look at UCX: its library, the devices that it finds, and a trial transfer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvplan.cli.info import trial
from kvplan.status import LLMException
from kvplan.transport.ucx.library import OVERRIDE, find, places, why_no_rdma
from kvplan.transport.ucx.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.transport.ucx.transport import UcxTransport

_EVERYTHING: Final = {"TLS": "^tcp", "NET_DEVICES": "all"}
_ANY_LIBRARY: Final = ""


def look(note: Callable[..., None]) -> None:
    """Report the library, its modules, the devices that it finds, and what RDMA lacks."""
    note(
        step="looking for UCX",
        ucx={"places": _places(), "environment": _environment()},
    )
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
    """Report how bytes would move, and move some between two ends of this process."""
    over = Metadata.from_bytes(ours.metadata(())).over
    note(step="trying a copy over UCX", ucx={"over": over.split()})
    tried = trial.over_ucx(ours, theirs)
    note(ucx={"copy": tried})
    if not tried["works"]:
        raise LLMException(f"a trial copy failed: {tried['why_not']}")


def _places() -> list[dict[str, object]]:
    return [
        {
            "path": place.path,
            "origin": place.source,
            "has": [str(place.library)] if place.library else [],
        }
        for place in places()
    ]


def _environment() -> dict[str, str]:
    """Return the environment variables of UCX, and the one that selects its library."""
    return {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith("UCX_") or name == OVERRIDE
    }


def _modules(library: str) -> list[str]:
    """Return the modules of the library, such as "ib" (verbs); shared memory is built in."""
    files = Path(library).resolve().parent.glob("ucx/libuct_*.so")
    return sorted(file.stem.removeprefix("libuct_") for file in files)


def _missing_for_rdma(library: str) -> list[str]:
    """Return all reasons; `why_no_rdma` returns only the first."""
    host = why_no_rdma(_ANY_LIBRARY)
    verbs = (
        "the library is built without verbs, as the wheel is: for RDMA install the system's UCX, "
        "or that of MLNX_OFED"
    )
    return [*filter(None, [host]), *([] if "ib" in _modules(library) else [verbs])]
