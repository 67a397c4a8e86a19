"""Try accelerators, UCX and copies: `python -m kvplan.cli.info.look FD DEVICE_ID`.

Writes a line of JSON to FD for each step and each finding, so that none is lost if a library ends
the process or hangs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from kvnative._backend import NativeError
from kvnative.ascend_files import ACL_NAMES, HCCL_NAMES, HIXL_NAMES, HOME_VARIABLES, homes, is_file
from kvplan.cli.common import NO_POOLS
from kvplan.control.auth import ClusterKey
from kvplan.device.ascend import OVERRIDE
from kvplan.device.ascend import load_library as load_acl
from kvplan.device.cuda import CudaDevice, driver_version
from kvplan.device.cuda import load_library as load_cuda
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.options import Options
from kvplan.links import ClusterInfo
from kvplan.planning.transfer import Rows, Transfer
from kvplan.status import LLMException
from kvplan.transport.ucx import library as ucx_library
from kvplan.types import BlocksCacheKey, CacheDesc, DataType, LlmRole, Placement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvnative._acl import AclLibrary
    from kvnative._cuda import CudaLibrary
    from kvplan.device.ascend import AscendDevice
    from kvplan.device.device import Device
    from kvplan.transport.choice import TransportOptions

Note = Callable[..., None]
_Place = dict[str, object]

_ANY_DEVICE: Final = {"TLS": "^tcp", "NET_DEVICES": "all"}  # settings of UCX

_DESC: Final = CacheDesc(2, (8, 32 << 10), DataType.DT_UINT8, Placement.HOST)
_TIMEOUT_MS: Final = 10_000
# The blocks at each stop: entry i of one stop is copied to entry i of the next.
_STOPS: Final = ([0, 2, 5, 7], [6, 1, 3, 0], [4, 7, 2, 5])
_GIVEN, _CAME, _BACK = _STOPS

_WAYS: Final = (("host", "host"), ("host", "device"), ("device", "device"))

COSTS: Final = {
    "aclrtMemcpyBatch": "pageable host memory is copied one descriptor at a time",
    "aclrtMemcpyBatchAsync": "pinned host memory is copied one descriptor at a time, or by "
    "aclrtMemcpyBatch if ACL has it",
    "aclrtHostRegisterV2": "none: aclrtHostRegister pins host memory",
    "aclrtGetPhyDevIdByLogicDevId": "the physical number of a device is taken from "
    "ASCEND_RT_VISIBLE_DEVICES, or else assumed to be the logical one; if that is wrong (in a "
    "container with some of the devices), give llm.LocalCommRes",
    "aclrtGetDeviceInfo": "on A3 the numbers of the super pod are unknown: give llm.LocalCommRes",
    "aclrtCreateEventExWithFlag": "none: aclrtCreateEvent makes events",
    "aclrtGetVersion": "none, if a version file says which CANN it is",
}


def main() -> None:
    """Run the program that the module's docstring describes."""
    file, device_id = int(sys.argv[1]), int(sys.argv[2])

    def note(**found: Any) -> None:
        os.write(file, json.dumps(found).encode() + b"\n")

    look(note, device_id)


def look(note: Note, device_id: int) -> None:
    """Report all findings to `note`."""
    with _open_device(note, device_id) as device:
        kind = "cuda" if isinstance(device, CudaDevice) else "ascend"
        accelerator = "none" if device is None else kind
        for num_devices in range(1 if device is None else 3):
            note(copies=_tried_copies(num_devices, accelerator, device_id))
        _look_at_transports(note, device)


@contextmanager
def _open_device(note: Note, device_id: int) -> Iterator[Device | None]:
    """Look at all devices; yield the one that engines would open, or None."""
    ascend = _look_at_ascend(note, device_id)
    cuda = _look_at_cuda(note, device_id)
    try:
        yield ascend or cuda
    finally:
        for device in (ascend, cuda):
            if device is not None:
                device.close()


def _look_at_ascend(note: Note, device_id: int) -> AscendDevice | None:
    from kvplan.device.ascend import AscendDevice

    note(step="opening the ACL library", accelerator={"places": _places_of_acl()})
    try:
        library = load_acl()
        note(accelerator=_of_library(library))
        note(step="asking ACL for its devices (aclInit)")
        count = library.device_count()
        note(accelerator={"soc": library.soc_name(), "num_devices": count})
    except (LLMException, NativeError) as error:
        note(accelerator={"why_not": _reason(error)})
        return None
    note(accelerator={"devices": [_of_device(note, library, number) for number in range(count)]})
    note(step="opening the HCCL library", accelerator={"hccl": _of_hccl(library)})
    note(step="opening the HIXL library", accelerator={"hixl": _of_hccl(library, is_hixl=True)})
    note(step=f"opening device {device_id}")
    try:
        return AscendDevice(device_id, library)
    except LLMException as error:
        note(accelerator={"why_not": _reason(error)})
    return None


def _of_library(library: AclLibrary) -> dict[str, object]:
    return {
        "library": library.path,
        "version": library.version,
        "missing": [{"name": name, "cost": COSTS.get(name, "")} for name in library.missing],
        "has_batch": library.has_batch,
    }


def _of_device(note: Note, library: AclLibrary, device_id: int) -> dict[str, object]:
    from kvplan.device.ascend import AscendDevice
    from kvplan.transport.hccl.addresses import device_address

    note(step=f"opening device {device_id}")
    try:
        device = AscendDevice(device_id, library)
    except LLMException as error:
        return {"id": device_id, "why_not": _reason(error)}
    found: dict[str, object] = {"id": device_id}
    try:
        found |= device.describe()
        found["max_batch"] = None if device.product is None else device.product.max_batch
        found["address"] = msgspec.structs.asdict(device_address(device, ""))
    except (LLMException, NativeError) as error:
        found["why_not" if len(found) == 1 else "no_address"] = _reason(error)
    finally:
        device.close()
    return found


def _of_hccl(library: AclLibrary, *, is_hixl: bool = False) -> dict[str, object]:
    names = HIXL_NAMES if is_hixl else HCCL_NAMES
    found: dict[str, object] = {"places": _places_of_hccl(Path(library.path), names)}
    try:
        from kvnative._hccl_memory import HcclLibrary

        hccl = HcclLibrary.load(library, client_server=is_hixl)
    except Exception as error:  # also if a module does not load
        return {**found, "why_not": _reason(error)}
    return {
        **found,
        "library": hccl.path,
        "missing": list(hccl.missing),
        "generation": hccl.generation,
    }


def _look_at_transports(note: Note, device: Device | None) -> None:
    from kvplan.transport.choice import TRANSPORTS, TransportOptions

    own = Options()  # of an engine in this environment
    options = TransportOptions(
        device=device, ucx_devices=own.ucx_devices, ucx_settings=own.ucx_settings
    )
    for name in TRANSPORTS:
        note(step=f"making transport {name}")
        found: dict[str, object] = {"name": name, "works": False, "reaches": []}
        try:
            found |= {"works": True, **_of_transport(note, name, options)}
        except Exception as error:  # also if a module does not load
            found["why_not"] = _reason(error)
            if name == "ucx":
                note(ucx={"why_not": found["why_not"]})
        note(transports=found)


def _of_transport(note: Note, name: str, options: TransportOptions) -> dict[str, object]:
    from kvplan.transport.choice import TRANSPORTS

    if name == "ucx":
        _look_at_ucx(note)
    with closing(TRANSPORTS[name](options)) as transport:
        found: dict[str, object] = {"reaches": sorted(transport.reaches)}
    if name in ("tcp", "ucx"):
        note(step=f"trying a copy over {name}")
        found["tried"] = _tried_between_engines(name)
    return found


# The folders in which the libraries of CANN are searched.


def _places_of_acl() -> list[_Place]:
    """Return the places where ACL is searched, in order."""
    if (override := os.environ.get(OVERRIDE)) is not None:
        return [_place(Path(override), f"${OVERRIDE}", ACL_NAMES)] if override else []
    return [*_of_homes(ACL_NAMES), _of_loader(ACL_NAMES)]


def _places_of_hccl(acl: Path, names: tuple[str, ...]) -> list[_Place]:
    """Return the places where HCCL or HIXL is searched: first the folder of ACL."""
    return [
        _place(acl.parent, "beside the ACL library", names),
        *_of_homes(names),
        _of_loader(names),
    ]


def _of_homes(names: tuple[str, ...]) -> list[_Place]:
    variables = {os.environ.get(name, ""): f"${name}" for name in reversed(HOME_VARIABLES)}
    return [_place(home, variables.get(str(home), "the installer's"), names) for home in homes()]


def _place(path: Path, origin: str, names: tuple[str, ...]) -> _Place:
    if is_file(path):
        return {"path": str(path), "origin": origin, "has": [path.name]}
    return {"path": str(path), "origin": origin, "has": _having(names, path / "lib64", path)}


def _of_loader(names: tuple[str, ...]) -> _Place:
    folders = [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
    has = _having(names, *map(Path, folders))
    return {"path": ":".join(folders), "origin": "the loader, $LD_LIBRARY_PATH", "has": has}


def _having(names: tuple[str, ...], *folders: Path) -> list[str]:
    """Return the files below these folders that exist."""
    paths = [folder / name for folder in folders for name in names]
    return [str(path) for path in paths if is_file(path)]


def _reason(error: Exception) -> str:
    """Return the text of an error, preceded by its type if it is not one of kvplan's."""
    text = str(error.args[0]) if error.args else ""
    ours = isinstance(error, (LLMException, NativeError))
    return text if ours and text else f"{type(error).__name__}: {text}"


def _look_at_cuda(note: Note, device_id: int) -> CudaDevice | None:
    """Report the CUDA devices; return the one of `device_id`, or None if it cannot be opened."""
    note(step="opening CUDA's library", cuda={"driver": driver_version()})
    try:
        library = load_cuda()
        note(
            step="asking CUDA for its devices (cuInit)",
            cuda={"library": library.path, "version": library.version},
        )
        count = library.device_count()
        note(cuda={"missing": list(library.missing), "num_devices": count})
        note(cuda={"devices": [_of_cuda_device(note, library, number) for number in range(count)]})
        note(step=f"opening CUDA device {device_id}")
        return CudaDevice(device_id, library)
    except (LLMException, NativeError) as error:
        note(cuda={"why_not": _reason(error)})
    return None


def _of_cuda_device(note: Note, library: CudaLibrary, device_id: int) -> dict[str, object]:
    note(step=f"opening CUDA device {device_id}")
    try:
        with closing(CudaDevice(device_id, library)) as device:
            return device.describe()
    except (LLMException, NativeError) as error:
        return {"id": device_id, "why_not": _reason(error)}


def _look_at_ucx(note: Note) -> None:
    """Report the library, its modules, the devices that it finds, and the reasons against RDMA."""
    note(
        step="looking for UCX",
        ucx={"places": _places_of_ucx(), "environment": _environment()},
    )
    found = ucx_library.find()
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
    worker = UcxWorker(library, settings=_ANY_DEVICE, name="kvplan info")
    try:
        note(ucx={"finds": worker.transports.split()})
    finally:
        worker.close()


def _places_of_ucx() -> list[dict[str, object]]:
    return [
        {
            "path": place.path,
            "origin": place.source,
            "has": [str(place.library)] if place.library else [],
        }
        for place in ucx_library.places()
    ]


def _environment() -> dict[str, str]:
    """Return the environment variables of UCX, and the one that selects its library."""
    return {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith("UCX_") or name == ucx_library.OVERRIDE
    }


def _modules(library: str) -> list[str]:
    """Return the modules of the library, such as "ib" (verbs); shared memory is built in."""
    files = Path(library).resolve().parent.glob("ucx/libuct_*.so")
    return sorted(file.stem.removeprefix("libuct_") for file in files)


def _missing_for_rdma(library: str) -> list[str]:
    """Return all reasons against RDMA; `why_no_rdma` returns only the first."""
    host = ucx_library.why_no_rdma("")
    verbs = (
        "the library is built without verbs, as the wheel is: for RDMA install the system's UCX, "
        "or that of MLNX_OFED"
    )
    return [*filter(None, [host]), *([] if "ib" in _modules(library) else [verbs])]


def _tried_copies(num_devices: int, accelerator: str, device_id: int) -> dict[str, object]:
    """Move blocks from host memory through 0, 1 or 2 device caches and back to host memory."""
    fault = one_by_one = ""
    options = Options(accelerator=accelerator, device_id=device_id, listen_ip_info="", **NO_POOLS)
    try:
        with LlmDataDist(1, LlmRole.MIX) as engine:
            engine.initialize(options)
            fault = _wrong_within(engine, num_devices)
            if engine.device is not None:
                one_by_one = engine.device.native.fallback_reason
    except (LLMException, NativeError, MemoryError) as error:
        fault = str(error.args[0]) if error.args else type(error).__name__
    local, remote = _WAYS[num_devices]
    found = {"local": local, "remote": remote, "works": not fault, "why_not": fault}
    return {**found, "one_by_one": one_by_one}


def _wrong_within(engine: LlmDataDist, num_devices: int) -> str:
    """Return the blocks that came back wrong, in words; empty if there are none."""
    on_device = replace(_DESC, placement=Placement.DEVICE)
    descs = [_DESC, *[on_device] * num_devices, _DESC]
    caches = [engine.allocate_blocks_cache(desc) for desc in descs]
    given, got = engine.arrays(caches[0]), engine.arrays(caches[-1])
    _fill(given)
    tables = [*_STOPS[: num_devices + 1], _GIVEN]
    for source, target in pairwise(map(Rows, caches, tables)):
        engine.run(Transfer(source, target), timeout_ms=_TIMEOUT_MS)
    wrong = [block for block in _GIVEN if (np.stack(got) != np.stack(given))[:, block].any()]
    return f"blocks {wrong} came back wrong" if wrong else ""


def _tried_between_engines(transport: str) -> str:
    """Pull and push over a transport on the loopback; return the way of the bytes."""
    with ExitStack() as stack:
        # A temporary key: the first use of the user's key would create its file.
        key = Path(stack.enter_context(TemporaryDirectory(prefix="kvplan-info-"))) / "key"
        ClusterKey.generate().save(key)
        common = Options(transport=transport, accelerator="none", cluster_key_file=str(key))
        owner, user = LlmDataDist(1, LlmRole.MIX), LlmDataDist(2, LlmRole.MIX)
        for engine, address in ((owner, "127.0.0.1:0"), (user, "")):
            engine.initialize(replace(common, listen_ip_info=address, advertise="", **NO_POOLS))
            stack.callback(engine.finalize)
        user.link_clusters([ClusterInfo(1, str(owner.listen_address))]).raise_for_status()
        there, here = BlocksCacheKey(1), user.allocate_blocks_cache(_DESC)
        tensors = owner.arrays(owner.allocate_blocks_cache(_DESC, there))
        expected = _fill(tensors)
        user.pull_blocks(there, here, _GIVEN, _CAME, timeout_ms=_TIMEOUT_MS)
        user.push_blocks(here, there, _CAME, _BACK, timeout_ms=_TIMEOUT_MS)
        if not np.array_equal(tensors, expected):
            raise LLMException(f"blocks {_GIVEN} were pulled or pushed wrong over {transport}")
        return user.links()[0].way


def _fill(tensors: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Fill tensors with random bytes; return the expected content after both copies."""
    for number, tensor in enumerate(tensors):
        tensor[:] = np.random.default_rng(number).integers(1, 256, tensor.shape, np.uint8)
    expected = np.stack(tensors)
    expected[:, _BACK] = expected[:, _GIVEN]
    return expected


if __name__ == "__main__":
    main()
