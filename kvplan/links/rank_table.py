"""Where the members of a communicator run, as a rank table says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvplan.inspection.units import plural
from kvplan.status import LLMException, invalid
from kvplan.validation import (
    UINT32_MAX,
    UINT64_MAX,
    check_mapping,
    check_type,
    check_width,
    shown,
)

VERSIONS = ("1.0", "1.2")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a rank runs; equal servers are one host.

    Attributes:
        server_id: address of the host: its `host_ip` where the table has one, else its
            `server_id`; empty: the host of this process.
        device_id: number of the device on that host.
    """

    server_id: str = ""
    device_id: int = 0


class _Device(msgspec.Struct):
    rank_id: str
    device_id: str = "0"


class _Server(msgspec.Struct):
    server_id: str
    device: list[_Device]
    host_ip: str = ""  # then server_id may be any name


class _RankTable(msgspec.Struct):
    version: str
    server_list: list[_Server]


def locate_members(
    cluster_id: int, cluster_rank_info: Mapping[int, int], rank_table: str
) -> dict[int, Location]:
    """Read where each member of a communicator runs, by cluster id."""
    check_mapping("cluster_rank_info", cluster_rank_info)
    for member, rank in cluster_rank_info.items():
        check_width("cluster_rank_info key", member, 0, UINT64_MAX)
        check_width(f"cluster_rank_info[{member}]", rank, 0, UINT32_MAX)
    ranks = list(cluster_rank_info.values())
    if not 2 <= len(ranks) <= 4:
        raise invalid(f"cluster_rank_info has {plural(len(ranks), 'member')}; [2, 4] are allowed")
    if ranks != sorted(ranks):
        raise invalid(f"cluster_rank_info={dict(cluster_rank_info)}: its ranks must not decrease")
    if cluster_id not in cluster_rank_info:
        raise invalid(
            f"cluster_rank_info={dict(cluster_rank_info)} lacks cluster {cluster_id}, which is "
            "this one"
        )
    located = locate(rank_table, set(ranks))
    return {member: located[rank] for member, rank in cluster_rank_info.items()}


def locate(rank_table: str, ranks: set[int]) -> dict[int, Location]:
    """Read where each of `ranks` runs."""
    if not check_type("rank_table", rank_table, str):
        return dict.fromkeys(ranks, Location())
    try:
        # str: of a subclass, such as NumPy's, msgspec would take the bytes in memory.
        table = msgspec.json.decode(str(rank_table), type=_RankTable)
        located = {
            _number(device.rank_id): Location(
                server.host_ip or server.server_id, _number(device.device_id)
            )
            for server in table.server_list
            for device in server.device
        }
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _bad(rank_table, str(error)) from None
    if table.version not in VERSIONS:
        raise _bad(
            rank_table, f"version {shown(table.version)} is not one of {', '.join(VERSIONS)}"
        )
    if missing := sorted(ranks - set(located)):
        raise _bad(rank_table, f"rank {missing[0]} is not in it; there are {sorted(located)}")
    return {rank: located[rank] for rank in ranks}


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= UINT32_MAX):
        raise ValueError(f"{text!r} is no number of a rank or device")
    return int(text)


def _bad(rank_table: str, why: str) -> LLMException:
    return invalid(f"rank_table={shown(rank_table)}: {why}")
