"""The ACL library of this host: found where CANN is installed, never linked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvnative._acl import AclLibrary

OVERRIDE: Final = "KVPLAN_ASCEND_LIBRARY"
"""Environment variable: where it is set, the only place that is looked at: a library, or the folder
of a toolkit. Empty: there is none. Otherwise `kvnative.ascend_files` says where."""


def load_library() -> AclLibrary:
    """Return the ACL library, loaded once in a process.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: there is none, or it cannot be used; says where it
            was looked for, and what the loader said.
    """
    place = os.environ.get(OVERRIDE)
    if place == "":
        raise _not_there(f"{OVERRIDE} is empty")
    from kvnative._acl import AclLibrary
    from kvnative._backend import NativeError

    try:
        return AclLibrary.load(place)
    except NativeError as error:
        raise _not_there(str(error)) from error


def _not_there(reason: str) -> LLMException:
    return LLMException(
        f"no runtime library of Ascend (ACL) can be used: {reason}",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    )
