"""Where members of a communicator meet: a socket of the user's own, or a port of the host."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvplan.control.endpoint import Endpoint
from kvplan.engine.links.rank_table import Location
from kvplan.engine.options import Options
from kvplan.status import LLMException


def meeting_point(
    here: Location, there: Location, comm_name: str, cluster_id: int, options: Options
) -> Endpoint:
    """Where `cluster_id`, which runs `there`, waits for a member that runs `here`.

    Args:
        here: where the member runs that calls.
        there: where the member runs that is called.
        comm_name: of the communicator.
        cluster_id: of the member that is called.
        options: the directory of sockets, and the port of device 0 of each host.

    Raises:
        LLMException: LLM_FAILED: the directory cannot be used.
    """
    if here.server_id == there.server_id:
        # Names of any length and bytes; the path of a socket is short.
        name = hashlib.sha256(comm_name.encode()).hexdigest()[:16]
        return Endpoint(path=str(own_directory(options.comm_dir) / f"{name}-{cluster_id}"))
    return Endpoint(there.server_id, options.comm_port + there.device_id)


def exposed_point(
    cluster_id: int, members: Mapping[int, Location], options: Options
) -> Endpoint | None:
    """Where `cluster_id` waits for members of other hosts; None: it waits for none."""
    here = members[cluster_id]
    if any(it > cluster_id and there.server_id != here.server_id for it, there in members.items()):
        return Endpoint(here.server_id, options.comm_port + here.device_id)
    return None


def own_directory(comm_dir: str | None) -> Path:
    """The directory of the user's sockets, made if need be; nobody else may enter it.

    Args:
        comm_dir: which; None: below XDG_RUNTIME_DIR, else /tmp/kvplan-<uid>.

    Raises:
        LLMException: LLM_FAILED: it cannot be made, or others could use it.
    """
    if comm_dir is not None:
        directory = Path(comm_dir)
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        directory = Path(runtime) / "kvplan"
    else:
        directory = Path("/tmp") / f"kvplan-{os.geteuid()}"
    try:
        directory.mkdir(mode=0o700, parents=False, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise LLMException(f"comm_dir {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise LLMException(f"comm_dir {directory} is not a directory of user {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise LLMException(
            f"comm_dir {directory} has mode {stat.S_IMODE(status.st_mode):04o}, so that others "
            "could take part; it must be 0700"
        )
    return directory
