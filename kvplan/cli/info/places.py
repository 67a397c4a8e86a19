"""Where libraries of the toolkit are looked for, and which of them are there."""

from __future__ import annotations

import os
from pathlib import Path

from kvnative.ascend_files import HOME_VARIABLES, homes
from kvplan.device.ascend import OVERRIDE

Place = dict[str, object]

ACL = ("libacl_rt.so", "libascendcl.so")
HCCL = ("libhcomm.so", "libhccl.so")


def of_acl() -> list[Place]:
    """Where ACL is looked for, in that order."""
    if (override := os.environ.get(OVERRIDE)) is not None:
        return [_place(Path(override), f"${OVERRIDE}", ACL)] if override else []
    return [*_of_homes(ACL), _of_loader(ACL)]


def of_hccl(acl: Path) -> list[Place]:
    """Where HCCL is looked for: first beside ACL."""
    return [_place(acl.parent, "beside the ACL library", HCCL), *_of_homes(HCCL), _of_loader(HCCL)]


def _of_homes(names: tuple[str, ...]) -> list[Place]:
    variables = {os.environ.get(it, ""): f"${it}" for it in reversed(HOME_VARIABLES)}
    return [_place(it, variables.get(str(it), "the installer's"), names) for it in homes()]


def _place(path: Path, origin: str, names: tuple[str, ...]) -> Place:
    if path.is_file():
        return {"path": str(path), "origin": origin, "has": [path.name]}
    folders = [it for it in (path / "lib64", path) if it.is_dir()]
    has = [str(it / name) for it in folders for name in names if (it / name).exists()]
    return {"path": str(path), "origin": origin, "has": has}


def _of_loader(names: tuple[str, ...]) -> Place:
    found = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    has = [
        str(Path(it) / name) for it in found if it for name in names if (Path(it) / name).exists()
    ]
    return {
        "path": ":".join(filter(None, found)),
        "origin": "the loader, $LD_LIBRARY_PATH",
        "has": has,
    }
