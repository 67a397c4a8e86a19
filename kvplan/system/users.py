"""Users of this host: their directories, and the user at the other end of a socket."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final, NamedTuple

from kvplan.status import LLMException

_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid


class StateFile(NamedTuple):
    """The path of a state file, and the reason why it is in the runtime directory, or ""."""

    path: Path
    why_not_home: str


def private_directory(directory: Path, name: str) -> Path:
    """Make a directory if needed; check that only this user can use it."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise LLMException(f"{name} {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise LLMException(f"{name} {directory} is not a directory of user {os.geteuid()}")
    if (mode := stat.S_IMODE(status.st_mode)) & _OTHERS:
        raise LLMException(
            f"{name} {directory} has mode {mode:04o}, so that others could take part; it must be "
            "0700"
        )
    return directory


def check_above(directory: Path, name: str) -> None:
    """Check that no other user can replace this directory by another.

    A user with write access to a directory may rename its entries, unless the directory is sticky.
    The owner of the directory always may.
    """
    # Trust the owner of the root directory, whose id may not be 0 in a user namespace.
    trusted = {0, os.geteuid(), os.stat("/").st_uid}  # noqa: PTH116
    # Check the parents by name, which may be symbolic links, and the real parents.
    for above in dict.fromkeys((*directory.absolute().parents, *directory.resolve().parents)):
        status = above.stat()
        mode = stat.S_IMODE(status.st_mode)
        if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
            raise LLMException(
                f"{name} {directory} is inside {above}, which others may write to (its mode is "
                f"{mode:04o}): they could replace it; chmod go-w {above}, or choose "
                "another place"
            )
        if status.st_uid not in trusted:
            raise LLMException(
                f"{name} {directory} is inside {above} of user {status.st_uid}, who could "
                "replace it; choose another place"
            )


def runtime_directory() -> Path:
    """Return the directory of this user's sockets: XDG_RUNTIME_DIR/kvplan, or /tmp/kvplan-<uid>."""
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    return given / "kvplan" if given.is_absolute() else Path("/tmp") / f"kvplan-{os.geteuid()}"


def state_file(name: str) -> StateFile:
    """Return the path of this user's state file.

    The file is in XDG_STATE_HOME, in the home, or else in the runtime directory: many containers
    have no writable home. Files that root makes in another user's home would not be readable for
    that user.
    """
    given, home = os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~")  # noqa: PTH111
    base = Path(given) if Path(given).is_absolute() else Path(home) / ".local" / "state"
    if not base.is_absolute():
        return StateFile(runtime_directory() / name, "this user has no home directory")
    file = base / "kvplan" / name
    found = next(parent for parent in file.parents if os.path.lexists(parent))
    if found.lstat().st_uid != os.geteuid():
        return StateFile(runtime_directory() / name, f"{found} is not of user {os.geteuid()}")
    is_writable = os.access(found, os.W_OK | os.X_OK, effective_ids=True)
    if not os.path.lexists(file) and not is_writable:
        return StateFile(runtime_directory() / name, f"{found} cannot be written to")
    return StateFile(file, "")


class Credentials(NamedTuple):
    """The process at the other end, at the time of its connect or listen call."""

    pid: int
    uid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    """Return the credentials of the other end, from the kernel."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(found)
    return Credentials(pid, uid)
