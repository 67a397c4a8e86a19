"""The ACL library of this host: found where CANN is installed, never linked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvnative._acl import AclLibrary

OVERRIDE: Final = "KVPLAN_ASCEND_LIBRARY"
"""Environment variable: where it is set, the only place that is looked at: a library, or a home of
CANN. Empty: there is none."""

# Before CANN 8.5 the second had all calls; since then it refers to the first.
_NAMES: Final = ("libacl_rt.so", "libascendcl.so")
_HOMES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_HOME")
_INSTALLED: Final = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")


def load_library() -> AclLibrary:
    """Return the ACL library, loaded once in a process.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: there is none, or it cannot be used; says where it
            was looked for, and what the loader said.
    """
    tried = []
    for place in places(os.environ):
        if os.sep in place and not Path(place).is_file():
            tried.append(f"{place}: not there")
            continue
        from kvnative._acl import AclLibrary
        from kvnative._backend import NativeError

        try:
            return AclLibrary.load(place)
        except NativeError as error:
            tried.append(str(error) if place in str(error) else f"{place}: {error}")
    where = "; ".join(tried) or f"{OVERRIDE} is empty, so nowhere was looked"
    raise LLMException(
        f"no runtime library of Ascend (ACL) can be used: {where}",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    )


def places(environment: Mapping[str, str]) -> Iterator[str]:
    """Where the library may be, the most likely first: paths, then names for the loader."""
    override = environment.get(OVERRIDE)
    if override is not None:
        if override and Path(override).is_dir():
            yield from _below(override)
        elif override:
            yield override
        return
    homes = [home for it in _HOMES if (home := environment.get(it))]
    for home in dict.fromkeys((*homes, *_INSTALLED)):
        yield from _below(home)
    yield from _NAMES


def _below(home: str) -> Iterator[str]:
    return (str(Path(home, "lib64", name)) for name in _NAMES)
