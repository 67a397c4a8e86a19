"""The key of a user: what engines of one user have in common inside a host, unless told otherwise.

Loopback is reached by every user of a host, so an address there is no proof of anything.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Final, NamedTuple

from kvplan.control.cluster_key import ClusterKey
from kvplan.control.own_directory import private_directory, state_file
from kvplan.logs import Log
from kvplan.status import LLMException, invalid

_NAME: Final = "user.key"
_REMEDY: Final = "or give kvplan.cluster_key_file ('kvplan keygen' makes one)"

_log = Log("kvplan.control")


class UserKeyState(NamedTuple):
    """What `kvplan info` says of it.

    Attributes:
        path: of its file.
        is_made: whether that is there.
        why_not_home: why it is not below the home; empty: it is.
        why_not: why it cannot be used; empty: it can.
    """

    path: str
    is_made: bool
    why_not_home: str
    why_not: str


def user_key() -> ClusterKey:
    """The key of this user; made where there is none, by one of all who need it at once.

    Raises:
        LLMException: LLM_PARAM_INVALID: its file or directory could be used by others, or cannot
            be made; says what to do.
    """
    path, why_not_home = state_file(_NAME)
    if why_not_home:
        _log.warning("event=user_key path=%s reason=%r", path, why_not_home)
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        private_directory(path.parent, "directory of the user's key")
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):  # another process was faster: its key it is
                ClusterKey.generate().save(path)
        key = ClusterKey.load(path)
    except OSError as error:
        raise invalid(
            f"user's key {path}: {error.strerror}; make this possible, {_REMEDY}"
        ) from None
    except LLMException as error:
        raise invalid(f"user's key: {error.args[0]}; mend or remove it, {_REMEDY}") from None
    advice = (
        f"this end uses the key of user {os.geteuid()} ({path}), as no kvplan.cluster_key_file is "
        "given: engines of different users, homes or containers need one, the same at both ends"
    )
    return replace(key, advice=advice)


def describe() -> UserKeyState:
    """Look at the key, and make nothing."""
    path, why_not_home = state_file(_NAME)
    why_not = ""
    if is_made := os.path.lexists(path):
        try:
            private_directory(path.parent, "its directory")
            ClusterKey.load(path)
        except LLMException as error:
            why_not = str(error.args[0])
    return UserKeyState(str(path), is_made, why_not_home, why_not)
