"""Files of measurements, by kind of machine, in the user's cache folder."""

from __future__ import annotations

import json
import os
import platform
import pwd
import re
from pathlib import Path
from typing import Any, Final, cast

from kvplan.status import LLMException, invalid
from kvplan.validation import check_type, open_regular, shown

_MAX_NBYTES: Final = 1 << 20
_CPUINFO_NBYTES: Final = 8192
"""Bytes of /proc/cpuinfo to read: the whole file takes milliseconds on a large machine."""


def cache_path(name: str) -> Path:
    """Return the path of a file in kvplan's folder of XDG_CACHE_HOME, or of ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():
        return Path(given, "kvplan", name)
    home = os.environ.get("HOME", "")
    if not Path(home).is_absolute():
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            raise invalid(
                f"no place for {name}: this user has no home directory; set XDG_CACHE_HOME"
            ) from None
    return Path(home, ".cache", "kvplan", name)


def cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            text = file.read(_CPUINFO_NBYTES).decode(errors="replace")
    except OSError:
        return {}
    rows = re.findall(r"^([^:\n]*?)\s*: *(.*)$", text.partition("\n\n")[0], re.MULTILINE)
    return dict(rows)


def model_of(fields: dict[str, str]) -> str:
    """Return the name of a processor from the result of `cpuinfo`."""
    if name := fields.get("model name"):
        return name
    if part := fields.get("CPU part"):  # Arm, without names in /proc/cpuinfo
        return f"Arm {fields.get('CPU implementer', '?')}/{part}"
    return platform.machine() or "unknown processor"


def read_machines(path: Path, version: int) -> dict[str, Any]:
    """Return the stored values by machine, unchecked; empty if the file does not exist."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return {}
    except LLMException:
        raise unreadable(path, "it is not a regular file") from None
    found = os.fstat(descriptor)
    if found.st_uid not in (0, os.geteuid()):
        os.close(descriptor)
        raise unreadable(path, f"it belongs to user {found.st_uid}")
    with os.fdopen(descriptor, "rb") as file:
        blob = file.read(_MAX_NBYTES + 1)
    if len(blob) > _MAX_NBYTES:
        raise unreadable(path, f"it has more than {_MAX_NBYTES} bytes")
    try:
        document = check_type("document", json.loads(blob), dict)
        found_version = document.get("schema_version")
        if found_version != version:
            raise unreadable(path, f"schema_version={shown(found_version)} must be {version}")
        return cast(dict[str, Any], check_type("machines", document.get("machines"), dict))
    except (ValueError, TypeError, RecursionError) as error:
        raise unreadable(path, str(error)) from None


def write_machines(path: Path, version: int, machines: dict[str, Any]) -> None:
    """Replace the file atomically: other processes read the old or the new content."""
    import tempfile  # slow to import, and needed only here

    try:
        text = json.dumps({"schema_version": version, "machines": machines}, indent=1)
    except RecursionError as error:  # writing needs more stack than reading
        raise unreadable(path, str(error)) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def unreadable(path: Path, why: str) -> LLMException:
    """Return the error for a file that cannot be used, with a remedy."""
    return invalid(f"{path}: {why}; remove it, and `kvplan tune` makes another")
