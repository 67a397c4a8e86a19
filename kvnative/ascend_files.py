"""Paths of the libraries of the Ascend toolkit and its driver, which are opened at run time."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "ACL_NAMES",
    "DRIVER_VARIABLE",
    "HCCL_NAMES",
    "HIXL_NAMES",
    "HOMES",
    "HOME_VARIABLES",
    "candidates",
    "driver_folder",
    "driver_version",
    "homes",
    "is_file",
    "max_registered",
    "toolkit_version",
]

# File names of libraries, best first.
ACL_NAMES = ("libacl_rt.so", "libascendcl.so")  # since CANN 8.5; before 8.5, and still a link
HCCL_NAMES = ("libhcomm.so", "libhccl.so")  # since CANN 8.5; before
HIXL_NAMES = ("libcann_hixl.so",)

DRIVER_VARIABLE = "KVPLAN_ASCEND_DRIVER"
"""Environment variable with the folder of the driver, if it is not the usual one."""
DRIVER = "/usr/local/Ascend/driver"

# Environment variables of the toolkit's set_env.sh, in the order of precedence.
HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_HOME")
# Default paths of the installer; `latest` and `cann` are links to the version in use.
HOMES = (
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/latest",
)

# Relative to a toolkit. The first has the release; components may have their own version.
VERSION_FILES = (
    "*_toolkit_install.info",
    "version.info",
    "runtime/version.info",
    "share/info/runtime/version.info",
)


def homes() -> list[Path]:
    """Return the folders where a toolkit may be, those of the environment first."""
    named = [os.environ.get(variable, "") for variable in HOME_VARIABLES]
    return list(dict.fromkeys(Path(value) for value in (*named, *HOMES) if value))


def candidates(names: tuple[str, ...], path: str | None = None) -> list[list[str]]:
    """Return lists of files to open together, in the order to try them.

    Args:
        names: file names of the library, best first.
        path: a file, or the folder of a toolkit or of its libraries; None to search.

    Returns:
        The lists; one of bare names stands for the loader's search.
    """
    if path is not None and not os.path.isdir(path):  # noqa: PTH112 - see `is_file`
        file = Path(path)
        others = [name for name in names if name != file.name and file.name in names]
        if "/" in path:
            others = [str(other) for other in map(file.with_name, others) if is_file(other)]
        return [[path, *others]]
    roots = homes() if path is None else [Path(path)]
    below = ("lib64", f"{platform.machine()}-linux/lib64", ".")
    folders = [root / folder for root in roots for folder in below]
    found = [[str(folder / name) for name in names if is_file(folder / name)] for folder in folders]
    return [*filter(None, found), *([list(names)] if path is None else [])]


def is_file(path: Path | str) -> bool:
    """Return True for a file: unlike Path.is_file, False below an unreadable folder."""
    return os.path.isfile(path)  # noqa: PTH113


def toolkit_version(library: str) -> str | None:
    """Return the version of the toolkit that the file `library` belongs to, such as "8.5.0"."""
    for root in list(Path(library).resolve().parents)[:4]:
        if root == root.parent:
            break
        for pattern in VERSION_FILES:
            for file in sorted(root.glob(pattern)):
                version = _version_in(file)
                if version:
                    return version
    return None


def driver_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the driver, which may not exist."""
    return Path(environment.get(DRIVER_VARIABLE) or DRIVER)


def driver_version() -> str | None:
    """Return the version of the driver (HDK), such as "25.5.0", or None if unknown."""
    return _version_in(driver_folder() / "version.info")


def max_registered(hdk: str | None) -> dict[str, int]:
    """Return the documented limits, in bytes of each kind, of memory that A2 and A3 register.

    Args:
        hdk: version of the driver, such as "25.5.0"; None counts as a new one.
    """
    version = re.match(r"(\d+)\.(\d+)", hdk or "")
    is_old = version is not None and (int(version[1]), int(version[2])) < (25, 5)
    return {"device": 50 << 30, "host": 20 << 30 if is_old else 1 << 40}


def _version_in(file: Path) -> str | None:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return None
    # version_dir is the release; Version is that of the component.
    for key in ("version_dir", "version"):
        line = re.search(rf"^{key}\s*=\s*\[?([\w.-]+)", text, re.MULTILINE | re.IGNORECASE)
        if line:
            return line[1]
    return None
