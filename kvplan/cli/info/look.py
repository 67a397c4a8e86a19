"""Look at accelerators and UCX: `python -m kvplan.cli.info.look FD DEVICE_ID`.

Writes a line of JSON to FD for each step and each finding, so that none is lost if a library ends
the process or hangs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from kvnative._backend import NativeError
from kvnative.ascend_files import HOME_VARIABLES, homes
from kvplan.cli.info import trial
from kvplan.cli.info.trial import ways_within
from kvplan.device.ascend import OVERRIDE
from kvplan.device.ascend import load_library as load_acl
from kvplan.device.cuda import CudaDevice, driver_version
from kvplan.device.cuda import load_library as load_cuda
from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvnative._acl import AclLibrary
    from kvnative._cuda import CudaLibrary
    from kvplan.device.ascend import AscendDevice
    from kvplan.device.device import Device
    from kvplan.transport.choice import TransportOptions
    from kvplan.transport.ucx.transport import UcxTransport

Note = Callable[..., None]
_Place = dict[str, object]

_ACL_NAMES = ("libacl_rt.so", "libascendcl.so")
_HCCL_NAMES = ("libhcomm.so", "libhccl.so")

COSTS: Final = {
    "aclrtMemcpyBatch": "pageable host memory is copied one descriptor at a time",
    "aclrtMemcpyBatchAsync": "pinned host memory is copied one descriptor at a time, or by "
    "aclrtMemcpyBatch where that is there",
    "aclrtHostRegisterV2": "none: aclrtHostRegister pins host memory",
    "aclrtGetPhyDevIdByLogicDevId": "the physical number of a device is taken from "
    "ASCEND_RT_VISIBLE_DEVICES, else to be its logical one; where it is not (a container with some "
    "of the devices), give llm.LocalCommRes",
    "aclrtGetDeviceInfo": "on A3 the numbers of the super pod are not known: give llm.LocalCommRes",
    "aclrtCreateEventExWithFlag": "transport hccl does not work: no staging memory",
    "aclrtSynchronizeEventWithTimeout": "transport hccl does not work: no staging memory",
    "aclrtGetVersion": "none, if a version file says which CANN it is",
}


def main() -> None:
    """Run as a program; see the docstring of the module."""
    file, device_id = int(sys.argv[1]), int(sys.argv[2])

    def note(**found: Any) -> None:
        os.write(file, json.dumps(found).encode() + b"\n")

    look(note, device_id)


def look(note: Note, device_id: int) -> None:
    """Report all findings to `note`."""
    with _open_device(note, device_id) as device:
        for way in ways_within(device):
            note(copies=trial.of_copies(way, device))
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


def _of_hccl(library: AclLibrary) -> dict[str, object]:
    found: dict[str, object] = {"places": _places_of_hccl(Path(library.path))}
    try:
        from kvnative._hccl_memory import HcclLibrary

        hccl = HcclLibrary.load(library)
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

    options = TransportOptions(device=device)
    for name in TRANSPORTS:
        note(step=f"making transport {name}")
        found: dict[str, object] = {"name": name, "works": False, "reaches": []}
        try:
            found |= {"works": True, **_of_transport(note, name, options)}
        except Exception as error:  # as above
            found["why_not"] = _reason(error)
            if name == "ucx":
                note(ucx={"why_not": found["why_not"]})
        note(transports=found)


def _of_transport(note: Note, name: str, options: TransportOptions) -> dict[str, object]:
    from kvplan.transport.choice import TRANSPORTS

    make = TRANSPORTS[name]
    if name == "ucx":
        from kvplan.cli.info import ucx

        ucx.look(note)
        with closing(make(options)) as ours, closing(make(options)) as theirs:
            ucx.look_at_transport(note, cast("UcxTransport", ours), cast("UcxTransport", theirs))
    found: dict[str, object] = {}
    if name == "tcp":
        note(step="trying a copy over tcp")
        found["tried"] = trial.between_engines(name)
    with closing(make(options)) as transport:
        found["reaches"] = sorted(transport.reaches)
    return found


# The folders in which libraries of the toolkit are searched.


def _places_of_acl() -> list[_Place]:
    """Return the places where ACL is searched, in order."""
    if (override := os.environ.get(OVERRIDE)) is not None:
        return [_place(Path(override), f"${OVERRIDE}", _ACL_NAMES)] if override else []
    return [*_of_homes(_ACL_NAMES), _of_loader(_ACL_NAMES)]


def _places_of_hccl(acl: Path) -> list[_Place]:
    """Return the places where HCCL is searched: first the folder of ACL."""
    return [
        _place(acl.parent, "beside the ACL library", _HCCL_NAMES),
        *_of_homes(_HCCL_NAMES),
        _of_loader(_HCCL_NAMES),
    ]


def _of_homes(names: tuple[str, ...]) -> list[_Place]:
    variables = {os.environ.get(name, ""): f"${name}" for name in reversed(HOME_VARIABLES)}
    return [_place(home, variables.get(str(home), "the installer's"), names) for home in homes()]


def _place(path: Path, origin: str, names: tuple[str, ...]) -> _Place:
    if path.is_file():
        return {"path": str(path), "origin": origin, "has": [path.name]}
    return {"path": str(path), "origin": origin, "has": _having(names, path / "lib64", path)}


def _of_loader(names: tuple[str, ...]) -> _Place:
    folders = [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
    has = _having(names, *map(Path, folders))
    return {"path": ":".join(folders), "origin": "the loader, $LD_LIBRARY_PATH", "has": has}


def _having(names: tuple[str, ...], *folders: Path) -> list[str]:
    """Return the paths below these folders that exist."""
    paths = [folder / name for folder in folders for name in names]
    return [str(path) for path in paths if path.exists()]


def _reason(error: Exception) -> str:
    """Return the text of an error; of other errors than ours with their type."""
    text = str(error.args[0]) if error.args else ""
    ours = isinstance(error, (LLMException, NativeError))
    return text if ours and text else f"{type(error).__name__}: {text}"


def _look_at_cuda(note: Note, device_id: int) -> CudaDevice | None:
    """Report the CUDA devices; return the device with `device_id`, or None if it cannot open."""
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


if __name__ == "__main__":
    main()
