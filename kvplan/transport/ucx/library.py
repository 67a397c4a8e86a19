"""The search for the UCX library (without loading it), the check for RDMA, and UCX's settings."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvnative.ascend_files import is_file
from kvplan.status import invalid, unsupported
from kvplan.validation import check_type, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

OVERRIDE: Final = "KVPLAN_UCX_LIBRARY"
"""Environment variable with the only place to search: the file libucp.so.0, its folder, or the
folder of an installation. Empty: UCX is not used."""

NAME: Final = "libucp.so.0"

_WHEEL: Final = "libucx"
"""The package that the wheel libucx-cu12 (the extra `ucx`) and its siblings install."""

DEVICES: Final = "UCX_NET_DEVICES"
TRANSPORTS: Final = "UCX_TLS"
_MAX_SETTINGS: Final = 256
_MAX_LENGTH: Final = 4096

_RDMA: Final = Path("/sys/class/infiniband")
_VERBS: Final = "libuct_ib.so*"

_LOADER_CACHE: Final = Path("/etc/ld.so.cache")
_LOADER_FOLDERS: Final = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


class Found(NamedTuple):
    """The library to load.

    Attributes:
        path: The path of libucp.so.0.
        source: The place, for display: "package libucx", "$LD_LIBRARY_PATH".
    """

    path: str
    source: str


class Place(NamedTuple):
    """A place where the library may be.

    Attributes:
        path: A file or folder; empty: unknown.
        source: The place, for display.
        library: The file; None: it does not exist.
    """

    path: str
    source: str
    library: Path | None


def find() -> Found:
    """Return the first library found.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: none is installed; the message lists the searched
            places and what to install.
    """
    looked_at = []
    for place in places():
        if place.library is not None:
            return Found(str(place.library), place.source)
        looked_at.append(f"{place.source} ({place.path or 'not installed'})")
    raise unsupported(
        f"no UCX library ({NAME}) was found in {', '.join(looked_at)}. Install UCX 1.13 or later "
        f"from the system's packages (libucx0, ucx) or MLNX_OFED, or name one in {OVERRIDE}; "
        "pip install 'kvplan[ucx]' has no RDMA and serves GPUs of one host"
    )


def places() -> Iterator[Place]:
    """Yield the places in the order of the search, each examined only when it is reached."""
    named = os.environ.get(OVERRIDE)
    if named is not None:
        yield Place(named or "empty", f"${OVERRIDE}", _in_installation(named) if named else None)
        return
    yield _of_wheel()
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        yield _of_folder(folder, "$LD_LIBRARY_PATH")
    yield _of_folder(str(Path(sys.prefix, "lib")), "this Python's environment")
    yield _of_cache()
    for folder in _LOADER_FOLDERS:
        yield _of_folder(folder, "the system")


def why_no_rdma(library: str) -> str:
    """Return why the UCX library at `library` cannot use RDMA; empty: it can.

    With an empty path only this host is checked.
    """
    if not _RDMA.is_dir():
        return f"this host has no RDMA device ({_RDMA} does not exist)"
    if not any(_is_active(port) for port in _RDMA.glob("*/ports/*/state")):
        return f"no port of an RDMA device is active (as {_RDMA}/*/ports/*/state says)"
    if library and not any(Path(library).resolve().parent.glob(f"**/{_VERBS}")):
        return (
            f"the UCX library {library} is built without verbs ({_VERBS} is not beside it), as the "
            f"wheel is: install the UCX of the system, or of MLNX_OFED, and name it in {OVERRIDE}"
        )
    return ""


def _is_active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text()
    except OSError:
        return False


def _of_wheel() -> Place:
    """Return the place in the installed package, without importing it."""
    spec = find_spec(_WHEEL)
    for folder in (spec and spec.submodule_search_locations) or ():
        return _of_folder(str(Path(folder, "lib")), f"package {_WHEEL}")
    return Place("", f"package {_WHEEL}", None)


def _of_folder(folder: str, source: str) -> Place:
    path = Path(folder, NAME)
    return Place(folder, source, path if is_file(path) else None)


def _of_cache() -> Place:
    """Return the place that is listed in the loader's cache, which ldconfig writes."""
    try:
        noted = _LOADER_CACHE.read_bytes()
    except OSError:
        noted = b""
    found = re.findall(rb"\0(/[^\0]*/" + re.escape(NAME.encode()) + rb")(?=\0)", noted)
    files = filter(is_file, map(Path, map(os.fsdecode, found)))
    return Place(str(_LOADER_CACHE), "the system", next(files, None))


def _in_installation(named: str) -> Path | None:
    """Return the library that a file, a folder, or the folder of an installation names."""
    root = Path(named)
    files = (root, *(root / folder / NAME for folder in (".", "lib", "lib64")))
    return next(filter(is_file, files), None)


def check_devices(name: str, value: object) -> str:
    """Return `value` if it is a list of devices as UCX takes it, such as "mlx5_0:1", or empty.

    Raises:
        TypeError: not a str.
        LLMException: LLM_PARAM_INVALID.
    """
    text = check_type(name, value, str)
    if text and not all(re.fullmatch(r"[\w.@:-]{1,64}", device) for device in text.split(",")):
        raise invalid(
            f"{name}={shown(text)} must be names of devices, separated by commas, such as "
            '"mlx5_0:1,mlx5_1:1", or empty'
        )
    return text


def check_settings(name: str, value: object) -> str:
    """Return `value` if `read_settings` accepts it.

    Raises:
        TypeError: not a str.
        LLMException: LLM_PARAM_INVALID.
    """
    text = check_type(name, value, str)
    read_settings(name, text)
    return text


def read_settings(name: str, text: str) -> dict[str, str]:
    """Return the settings in a JSON object such as {"UCX_TLS": "rc"}.

    UCX itself refuses unknown settings.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if not text:
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name}={shown(text)} is not JSON: {error}") from None
    if not isinstance(document, dict) or len(document) > _MAX_SETTINGS:
        raise invalid(
            f"{name}={shown(text)} must be a JSON object of at most {_MAX_SETTINGS} settings"
        )
    for key, value in document.items():
        if not re.fullmatch("UCX_[A-Z0-9_]{1,64}", key):
            raise invalid(f'{name} has the key {shown(key)}; it must be like "UCX_TLS"')
        if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_LENGTH:
            raise invalid(
                f"{name} has {key}={shown(value)}; it must be text of at most {_MAX_LENGTH} "
                'printable characters, such as "16"'
            )
    return document
