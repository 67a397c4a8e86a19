"""What an engine is initialized with: a typed value, or the reference's mapping of strings."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from kvplan.engine.option_rows import (
    OPTION_LISTEN_IP_INFO,
    ROWS,
    SPELLINGS,
    check_resource_file,
    ignored,
)
from kvplan.engine.option_sources import (
    configured,
    from_environment,
    naming_sources,
    read_file,
    values_of,
)
from kvplan.engine.pools import PoolConfig
from kvplan.status import invalid
from kvplan.validation import check_mapping, check_type, shown

_T = TypeVar("_T")


def _completed(cls: type[_T]) -> type[_T]:
    """Have arguments that are not given come from the environment, and from the file it names."""
    from_arguments = vars(cls)["__init__"]

    @wraps(from_arguments)
    def init(self: _T, **given: Any) -> None:
        found = {name: it for name, it in configured().items() if name not in given}
        with naming_sources(found):
            from_arguments(self, **given, **values_of(found))

    type.__setattr__(cls, "__init__", init)
    return cls


@_completed
@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What an engine is initialized with; every field has a default that works.

    A field that is not given is as the environment variable KVPLAN_<FIELD> says, such as
    KVPLAN_TRANSPORT, else as the file that KVPLAN_OPTIONS_FILE names (see `from_file`).

    Attributes:
        listen_ip_info: "ip:port" to listen at, IPv6 in brackets, port 0: any; empty: a client.
        device_id: of the device whose caches these are; a label where there is no accelerator.
        sync_kv_cache_wait_time: ms that a pull or push may take.
        mem_pool_config: pool of caches with Placement.DEVICE; None: each has memory of its own.
        host_mem_pool_config: the same for Placement.HOST.
        prefault: have every page of the host's memory when a pool, or a cache without one, is made:
            too little memory is refused then (LLM_OUT_OF_MEMORY), and no first use of a page takes
            time, or fails; otherwise pages come at first use.
        pages: that the host's memory of a pool, or a cache without one, has. "auto": huge ones, of
            2 MiB, with `prefault`, as far as the system has them, and where it gives them anyway;
            "collapse": also without, in the background, as it fills; "small"; "hugetlb": those that
            the administrator has reserved (`sysctl vm.nr_hugepages`), all taken when it is made.
        numa_node: that this memory comes from, as long as it has any left, and whose processors
            copy for this engine if there are several nodes; None: as the system does.
        populate: when the pages of peers' arenas on this host are mapped here: "background": those
            that their owners have filled, soon after linking, by a thread; "now": all of them, at
            once, which allocates what an owner has not touched; "off": each at its first use.
        allow_overcommit: let a pool, or a cache without one, be larger than all memory and swap
            there is, here or in the cgroup.
        local_comm_res, global_resource_config: JSON of the reference.
        link_total_time: s within which all members of a `link` must have come; 0: 60. What
            `link_clusters` may take is its timeout_ms.
        link_retry_count: times that `link_clusters` tries to connect, within its timeout_ms; `link`
            tries until its time is over.
        rdma_traffic_class, rdma_service_level: for RDMA; None: the system's.
        accelerator: "ascend" or "cuda": caches with Placement.DEVICE are in the memory of that
            device; "none": the placement is a label, and all caches are in host memory; "auto": as
            the first of them whose library and device are found, else as "none".
        cuda_context: that a CUDA device works in: "primary", which the program's frameworks use as
            well; "own": errors of their streams are not those of transfers then, but what they
            allocate cannot be registered.
        transport: how peers' memory is reached; "auto" chooses.
        staging_nbytes: of device memory, through which memory goes that HCCL does not take as it
            is; 0: none, and such transfers are refused.
        ucx_devices: that UCX may use, with commas between, such as "mlx5_0:1,mlx5_1:1"; empty: UCX
            chooses.
        ucx_settings: of UCX, a JSON object such as {"UCX_IB_GID_INDEX": "3"}; what it says counts.
            UCX_TLS chooses among the ways that UCX has: without it there must be RDMA, and TCP may
            not be among them.
        permit_any_peer: let every process of this user trace this one. Where Yama asks for it
            (`kernel.yama.ptrace_scope=1`, as on Ubuntu), peers reach registered memory only so.
        tcp_connections: 1 to 16 to each peer over tcp, each with a thread at both ends, that
            together move what is large; both ends use as many as the one with fewer. None: 1 below
            4 cores, 2 from 4 on, 4 from 8 on, 8 from 16 on.
        tcp_congestion: congestion control of these connections, such as "bbr", which the kernel
            must have and permit; empty: the system's.
        tcp_source: IP address of this host that links are made from, their handshake and their data
            over tcp; of the family of the peers' addresses. Empty: as the routes say.
        cluster_key_file: path of the key that all engines of a cluster share; None: no
            authentication.
        encrypt: encrypt all data that goes over tcp, by AES-GCM; done where either end demands it.
        heartbeat_interval_ms: ms without a message after which a link sends one.
        heartbeat_timeout_ms: ms without hearing from a peer after which its link is broken.
        max_links: peers that may be linked at once.
        max_tensors: addresses that a registered cache may have.
        comm_port: of the rendezvous of `link`, across hosts.
        comm_dir: of the rendezvous of `link`, on one host; None: the user's runtime directory.
        tuning: how copies are made on this machine: "auto", as `kvplan tune` has stored, else as
            built in; "builtin"; or a JSON object with the fields that differ from the built-in
            tuning, such as {"bypass_nbytes": 16777216}. None: the value of the environment variable
            KVPLAN_TUNING, or "auto". Engines with equal values share their threads.
        unlike_caches: what is done about a transfer between caches whose data types, shapes or
            layouts cannot match: "refuse" it, or copy the bytes and "warn", once for each pair, as
            the official surface does.
        verify: read what a transfer has moved again, and compare it with the other side: "off",
            "all", or "sample:1/64", one descriptor of 64; what is read again costs a transfer more.
        opentelemetry: make a span of OpenTelemetry of each transfer; needs the extra `otel`.
        status_socket: let programs of this user on this host ask what the engine does, as
            `kvplan top` does; nothing runs until one asks.

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
    prefault: bool = False
    allow_overcommit: bool = False
    pages: str = "auto"
    numa_node: int | None = None
    populate: str = "background"
    local_comm_res: str = ""
    global_resource_config: str = ""
    link_total_time: int = 0
    link_retry_count: int = 1
    rdma_traffic_class: int | None = None
    rdma_service_level: int | None = None
    accelerator: str = "auto"
    cuda_context: str = "primary"
    staging_nbytes: int = 32 << 20
    transport: str = "auto"
    ucx_devices: str = ""
    ucx_settings: str = ""
    permit_any_peer: bool = False
    tcp_connections: int | None = None
    tcp_congestion: str = ""
    tcp_source: str = ""
    cluster_key_file: str | None = None
    encrypt: bool = False
    heartbeat_interval_ms: int = 1000
    heartbeat_timeout_ms: int = 5000
    max_links: int = 512
    max_tensors: int = 240
    comm_port: int = 26900
    comm_dir: str | None = None
    tuning: str | None = None
    unlike_caches: str = "refuse"
    verify: str = "off"
    opentelemetry: bool = False
    status_socket: bool = True

    def __post_init__(self) -> None:
        for row in ROWS:
            if (value := getattr(self, row.field)) is not None or not row.optional:
                row.check(f"{row.field} ({row.keys[0]})", value)
        if self.heartbeat_timeout_ms <= self.heartbeat_interval_ms:
            raise invalid(
                f"heartbeat_timeout_ms={self.heartbeat_timeout_ms} must be more than "
                f"heartbeat_interval_ms={self.heartbeat_interval_ms}"
            )
        if not self.local_comm_res:  # it is used in place of the file
            check_resource_file("global_resource_config", self.global_resource_config)

    def differences(self, other: Options) -> str:
        """Return the options that differ from those of `other`, each with both values."""
        pairs = [(it.name, getattr(self, it.name), getattr(other, it.name)) for it in fields(self)]
        return ", ".join(
            f"{name}={shown(mine)}, not {shown(theirs)}"
            for name, mine, theirs in pairs
            if mine != theirs
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **given: Any) -> Options:
        """Return the options of a TOML file, in its table [kvplan].

        Arguments take precedence over environment variables, these over the file.

        Args:
            path: of the file. Keys are those of a mapping, with or without prefix, or fields.
            given: fields.

        Raises:
            TypeError, ValueError: as the class.
            LLMException: LLM_PARAM_INVALID: as the class; the file cannot be read, is not TOML, has
                no table [kvplan], or an unknown key. Names the file and the key.
        """
        before = given.keys() | from_environment().keys()
        found = {name: it for name, it in read_file(path).items() if name not in before}
        with naming_sources(found):
            return cls(**given, **values_of(found))

    @classmethod
    def of(cls, options: Mapping[str, str] | Options | None) -> Options:
        """Return `options` as this type; a mapping has the reference's keys and text values.

        Keys may omit the prefix `llm.` (or `kvplan.`, of options that the reference has not).
        Options of the reference that have no effect here are checked and ignored. An unknown key
        causes a warning that names the nearest; one that is nearly `llm.ListenIpInfo` is refused.

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
        for key, text in options.items():
            check_type("options key", key, str)
            check_type(f"options[{key!r}]", text, str)
            row = SPELLINGS.get(key)
            if row is None:
                if not ignored(key, key, text):
                    warnings.warn(unknown_key(key), stacklevel=2)
                continue
            before = texts.setdefault(row.field, (key, text))
            if before[1] != text:
                raise invalid(
                    f"{key}={shown(text)} and {before[0]}={shown(before[1])} are the same option"
                )
            values[row.field] = row.read(key, text)
        return cls(**values)


def unknown_key(key: str) -> str:
    """What to warn of about a key that no option has, naming the nearest."""
    plain = re.sub("[^a-z0-9]", "", key.lower().removeprefix("llm.").removeprefix("kvplan."))
    if plain.startswith("listen") or get_close_matches(plain, ["listenipinfo"], cutoff=0.8):
        raise invalid(
            f"option {key!r} is unknown, and without it the engine would listen nowhere; where to "
            f"listen is {OPTION_LISTEN_IP_INFO!r}"
        )
    near = get_close_matches(key, SPELLINGS, n=1, cutoff=0.0)[0]
    return f"option {key!r} is unknown and ignored; the nearest is {near!r}"
