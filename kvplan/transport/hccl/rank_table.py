"""The rank table of two devices, which both ends compute alike, byte for byte.

Not to be taken for that of `link()`, which the user gives (`kvplan.links.rank_table`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvplan.ascend.products import A2, A3
from kvplan.transport.identity import link_failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvplan.ascend.products import Product
    from kvplan.transport.hccl.device_address import DeviceAddress


@dataclass(frozen=True, slots=True)
class RankTable:
    """A rank table of two.

    Attributes:
        text: as HCCL takes it, JSON.
        rank: of this end.
        remote_rank: of the other.
    """

    text: str
    rank: int
    remote_rank: int


def table_of(here: DeviceAddress, there: DeviceAddress) -> RankTable:
    """The rank table of this device and a peer's, of the lower of both versions.

    Ranks are numbered in the order of the hosts' names, then of the devices' numbers and addresses,
    all as text; so `table_of(b, a)` has the same text, and the ranks the other way round.

    Raises:
        LLMException: LLM_LINK_FAILED: no table has both, and what is missing.
    """
    if reason := why_not(here, there):
        raise link_failed(reason)
    version = min(here.version, there.version)
    ranked = sorted((here, there), key=_order)
    table: dict[str, Any] = {"version": version}
    # Of one host or super pod addresses need not be known: then neither is told.
    with_ip = None not in (here.device_ip, there.device_ip)
    servers = [
        {
            "server_id": server_id,
            "device": [_device(it, ranked.index(it), version, with_ip=with_ip) for it in of_it],
        }
        for server_id, of_it in groupby(ranked, key=lambda it: it.server_id)
    ]
    table["server_count"] = str(len(servers))
    table["server_list"] = servers
    if version == "1.2":
        table["super_pod_list"] = _pods(ranked)
    table["status"] = "completed"
    rank = ranked.index(here)
    return RankTable(json.dumps(table, separators=(",", ":")), rank, 1 - rank)


def why_not(here: DeviceAddress, there: DeviceAddress) -> str | None:
    """Why no rank table can have both devices; None: one can."""
    same_host = here.server_id == there.server_id
    if same_host and here.device_id == there.device_id:
        return (
            f"both ends use device {here.device_id} of host {here.server_id!r}; HCCL connects two "
            "devices: give each engine a DeviceId of its own"
        )
    same_pod = False
    if min(here.version, there.version) == "1.2":
        same_pod = here.super_pod_id == there.super_pod_id
        if same_host and not same_pod:
            pods = f"{here.super_pod_id!r} and {there.super_pod_id!r}"
            return f"host {here.server_id!r} would be in two super pods, {pods}"
        if same_pod and here.super_device_id == there.super_device_id:
            return f"both ends have the same super_device_id, {here.super_device_id}"
    needs_ip = _is_rdma_wanted() or not (same_host or same_pod)
    for whose, it in (("this", here), ("the peer's", there)):
        if it.device_ip is None and needs_ip:
            return (
                f"device_ip of {whose} device {it.device_id} is not known, which two hosts need: "
                f"have address_{it.device_id}=<ip> in /etc/hccn.conf, or give llm.LocalCommRes"
            )
    if here.device_ip is not None and here.device_ip == there.device_ip:
        return f"both ends have the same device_ip, {here.device_ip}; each device has its own"
    return None


def is_over_hccs(product: Product, here: DeviceAddress, there: DeviceAddress) -> bool:
    """Whether HCCL takes HCCS between the two, as it decides from their rank table; else RDMA."""
    if _is_rdma_wanted():
        return False
    if product is A3:
        return here.super_pod_id == there.super_pod_id
    return product is A2 and here.server_id == there.server_id


def _is_rdma_wanted() -> bool:
    """HCCL's own variable: RDMA inside a host, too. Both ends must have it alike."""
    return os.environ.get("HCCL_INTRA_ROCE_ENABLE") == "1"


def _order(it: DeviceAddress) -> tuple[str, ...]:
    return it.server_id, it.device_id, it.device_ip or "", it.device_port or ""


def _device(it: DeviceAddress, rank: int, version: str, *, with_ip: bool) -> dict[str, str]:
    device = {"device_id": it.device_id}
    for name in ("device_ip", "device_port"):
        if with_ip and (value := getattr(it, name)) is not None:
            device[name] = value
    if version == "1.2":
        assert it.super_device_id is not None
        device["super_device_id"] = it.super_device_id
    return {**device, "rank_id": str(rank)}


def _pods(ranked: Sequence[DeviceAddress]) -> list[dict[str, Any]]:
    # Each host once, in the order of the ranks.
    hosts = dict.fromkeys((it.super_pod_id or "", it.server_id) for it in ranked)
    return [
        {"super_pod_id": pod, "server_list": [{"server_id": host} for _, host in of_it]}
        for pod, of_it in groupby(sorted(hosts), key=lambda it: it[0])
    ]
