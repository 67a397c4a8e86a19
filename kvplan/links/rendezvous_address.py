"""Where members of a communicator meet: a socket of the user's own, or a port of the host."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from kvplan.control.endpoint import Endpoint
from kvplan.control.own_directory import check_above, private_directory, runtime_directory
from kvplan.links.local_engine import LinkOptions
from kvplan.links.rank_table import Location


def meeting_point(
    here: Location, there: Location, comm_name: str, cluster_id: int, options: LinkOptions
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
    cluster_id: int, members: Mapping[int, Location], options: LinkOptions
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
    directory = runtime_directory() if comm_dir is None else Path(comm_dir)
    private_directory(directory, "comm_dir")
    check_above(directory, "comm_dir")
    return directory
