"""What an engine is initialized with: a typed value, or the reference's mapping of strings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from kvplan.engine.option_rows import ROWS, SPELLINGS, WITHOUT_MEANING
from kvplan.engine.pools import PoolConfig
from kvplan.status import invalid
from kvplan.transport.ucx.modes import DEFAULT_LANES
from kvplan.validation import check_mapping, check_type, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What an engine is initialized with; every field has a default that works.

    Attributes:
        listen_ip_info: "ip:port" to listen at, IPv6 in brackets, port 0: any; empty: a client.
        device_id: of the device whose caches these are; a label where there is no accelerator.
        sync_kv_cache_wait_time: ms that a pull or push may take.
        mem_pool_config: pool of caches with Placement.DEVICE; None: each has memory of its own.
        host_mem_pool_config: the same for Placement.HOST.
        buf_pool_cfg, local_comm_res, global_resource_config: JSON of the reference.
        transfer_backend: of the reference: empty or "hixl".
        enable_switch_role, enable_cache_manager, enable_remote_cache_accessible: of the
            reference; here all three always are.
        link_total_time: s within which all members of a `link` must have come; 0: 60. What
            `link_clusters` may take is its timeout_ms.
        link_retry_count: times that `link_clusters` tries to connect, within its timeout_ms; `link`
            tries until its time is over.
        rdma_traffic_class, rdma_service_level: for RDMA; None: the system's.
        accelerator: "ascend": caches with Placement.DEVICE are in the memory of that device;
            "none": the placement is a label, and all caches are in host memory; "auto": as "ascend"
            where its runtime library and the device are found, else as "none".
        transport: how peers' memory is reached; "auto" chooses.
        staging_nbytes: of device memory, through which memory goes that HCCL does not take as it
            is; 0: none, and such transfers are refused.
        ucx_mode: how bytes move over UCX: "gathered", in messages that carry many blocks each;
            "one_sided", a get or put for each descriptor; "auto": one_sided where there is RDMA.
            Both ends of a link must have the same.
        ucx_devices: that UCX may use, with commas between, such as "eth0,mlx5_0:1"; empty: UCX
            chooses, but not the loopback where there is another.
        ucx_settings: of UCX, a JSON object such as {"UCX_TLS": "tcp"}; what it says counts.
        ucx_lanes: connections to each peer, each with a thread at both ends, that together move
            what is large by messages of UCX; both ends use as many as the one with fewer.
        permit_any_peer: let every process of this user trace this one. Where Yama asks for it
            (`kernel.yama.ptrace_scope=1`, as on Ubuntu), peers reach registered memory only so.
        cluster_key_file: path of the key that all engines of a cluster share; None: no
            authentication.
        heartbeat_interval_ms: ms without a message after which a link sends one.
        heartbeat_timeout_ms: ms without hearing from a peer after which its link is broken.
        max_links: peers that may be linked at once.
        max_tensors: addresses that a registered cache may have.
        comm_port: of the rendezvous of `link`, across hosts.
        comm_dir: of the rendezvous of `link`, on one host; None: the user's runtime directory.
        other: options of the reference without meaning here, by key, kept as given.

    Raises:
        TypeError: a field of another type.
        ValueError: an integer outside the reference's field.
        LLMException: LLM_PARAM_INVALID: a value that breaks a rule.
    """

    listen_ip_info: str = ""
    device_id: int = 0
    sync_kv_cache_wait_time: int = 1000
    mem_pool_config: PoolConfig | None = None
    host_mem_pool_config: PoolConfig | None = None
    buf_pool_cfg: str = ""
    local_comm_res: str = ""
    global_resource_config: str = ""
    transfer_backend: str = ""
    enable_switch_role: bool = True
    enable_cache_manager: bool = True
    enable_remote_cache_accessible: bool = True
    link_total_time: int = 0
    link_retry_count: int = 1
    rdma_traffic_class: int | None = None
    rdma_service_level: int | None = None
    accelerator: str = "auto"
    staging_nbytes: int = 32 << 20
    transport: str = "auto"
    ucx_mode: str = "auto"
    ucx_devices: str = ""
    ucx_settings: str = ""
    ucx_lanes: int = DEFAULT_LANES
    permit_any_peer: bool = False
    cluster_key_file: str | None = None
    heartbeat_interval_ms: int = 1000
    heartbeat_timeout_ms: int = 5000
    max_links: int = 512
    max_tensors: int = 240
    comm_port: int = 26900
    comm_dir: str | None = None
    other: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for row in ROWS:
            if (value := getattr(self, row.field)) is not None or not row.optional:
                row.check(f"{row.field} ({row.keys[0]})", value)
        if self.heartbeat_timeout_ms <= self.heartbeat_interval_ms:
            raise invalid(
                f"heartbeat_timeout_ms={self.heartbeat_timeout_ms} must be more than "
                f"heartbeat_interval_ms={self.heartbeat_interval_ms}"
            )
        check_mapping("other", self.other)
        object.__setattr__(self, "other", dict(self.other))  # the caller's may change

    @classmethod
    def of(cls, options: Mapping[str, str] | Options | None) -> Options:
        """Return `options` as this type; a mapping has the reference's keys and text values.

        Keys may omit the prefix `llm.` (or `kvplan.`, of options that the reference has not). An
        unknown key is warned of, naming the nearest.

        Raises:
            TypeError: neither of these, or a key or value that is not text.
            ValueError, LLMException: as the class.
        """
        if options is None:
            return cls()
        if isinstance(options, Options):
            return options
        check_mapping("options", options)
        values: dict[str, Any] = {}
        texts: dict[str, tuple[str, str]] = {}  # field -> key, text
        other: dict[str, str] = {}
        for key, text in options.items():
            check_type("options key", key, str)
            check_type(f"options[{key!r}]", text, str)
            row = SPELLINGS.get(key)
            if row is None:
                if key.removeprefix("llm.") in WITHOUT_MEANING or key.startswith("ge."):
                    other[key] = text
                else:
                    _warn_unknown(key)
                continue
            before = texts.setdefault(row.field, (key, text))
            if before[1] != text:
                raise invalid(
                    f"{key}={shown(text)} and {before[0]}={shown(before[1])} are the same option"
                )
            values[row.field] = row.read(key, text)
        return cls(**values, other=other)


def _warn_unknown(key: str) -> None:
    near = get_close_matches(key, SPELLINGS, n=1, cutoff=0.0)[0]
    warnings.warn(f"option {key!r} is unknown and ignored; the nearest is {near!r}", stacklevel=3)
