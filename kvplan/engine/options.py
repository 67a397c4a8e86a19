"""Options of an engine: a typed value, or the mapping of strings of the reference."""

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
    """Let the constructor take missing arguments from the environment and from its file."""
    from_arguments = vars(cls)["__init__"]

    @wraps(from_arguments)
    def init(self: _T, **given: Any) -> None:
        found = {name: setting for name, setting in configured().items() if name not in given}
        with naming_sources(found):
            from_arguments(self, **given, **values_of(found))

    type.__setattr__(cls, "__init__", init)
    return cls


@_completed
@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of an engine; every field has a default that works.

    A missing field has the value of the environment variable KVPLAN_<FIELD>, such as
    KVPLAN_TRANSPORT, otherwise that of the file named by KVPLAN_OPTIONS_FILE (see `from_file`).

    Attributes:
        listen_ip_info: "ip:port" to listen at, IPv6 in brackets, port 0: any; empty: a client.
        device_id: number of the device of the caches; a label without an accelerator.
        sync_kv_cache_wait_time: time limit of a pull or push, in ms.
        mem_pool_config: pool of caches with Placement.DEVICE; None: each has memory of its own.
        host_mem_pool_config: the same for Placement.HOST.
        prefault: populate all host memory of a pool, or of a cache without a pool, when it is
            made. Too little memory is then an error at once (LLM_OUT_OF_MEMORY), and no first use
            of a page takes time or fails. Otherwise the first use populates a page.
        pages: pages of host memory of a pool, or of a cache without a pool. "auto": huge pages of
            2 MiB with `prefault`, as far as available, and where the system gives them anyway;
            "collapse": also without `prefault`, in the background, as memory fills; "small";
            "hugetlb": pages reserved by the administrator (`sysctl vm.nr_hugepages`).
        numa_node: node that this memory comes from while it has free memory, and whose processors
            copy for this engine if the machine has several nodes; None: the system chooses.
        populate: when to map pages of peers' arenas on this host. "background": a thread maps
            those that their owners have filled, soon after linking; "now": all at once, which
            allocates untouched pages; "off": each at its first use.
        allow_overcommit: allow a pool, or a cache without a pool, larger than all memory and swap
            of the machine or the cgroup.
        local_comm_res, global_resource_config: JSON of the reference.
        link_total_time: seconds in which all members of a `link` must join; 0: 60 seconds.
            `link_clusters` has timeout_ms instead.
        link_retry_count: number of attempts to connect by `link_clusters`, within its timeout_ms;
            `link` tries until its time has passed.
        rdma_traffic_class, rdma_service_level: for RDMA; None: the defaults of the system.
        accelerator: "ascend" or "cuda": caches with Placement.DEVICE are in memory of that device;
            "none": the placement is a label, and all caches are in host memory; "auto": the first
            accelerator whose library and device are found, otherwise "none".
        cuda_context: context of a CUDA device. "primary": the one of the program's frameworks;
            "own": errors of their streams do not affect transfers, but their memory cannot be
            registered.
        transport: name of the transport; "auto" chooses.
        staging_nbytes: bytes of device memory to stage memory that HCCL cannot register; 0: none,
            and such transfers are refused.
        ucx_devices: devices that UCX may use, such as "mlx5_0:1,mlx5_1:1"; empty: UCX chooses.
        ucx_settings: settings of UCX, a JSON object such as {"UCX_IB_GID_INDEX": "3"}; they take
            precedence. UCX_TLS selects UCX's transports; without it RDMA is required, and TCP is
            not used.
        permit_any_peer: let every process of this user trace this one. With
            `kernel.yama.ptrace_scope=1`, as on Ubuntu, peers need it to reach registered memory.
        tcp_connections: 1 to 16 connections to each peer over tcp, each with a thread at both
            ends, which share large transfers; both ends use the smaller number. None: 1 below 4
            cores, 2 from 4 on, 4 from 8 on, 8 from 16 on.
        tcp_congestion: congestion control of these connections, such as "bbr", which the kernel
            must have and permit; empty: the default of the system.
        tcp_source: IP address of this host for outgoing handshakes and data over tcp, of the
            family of the peers' addresses. Empty: chosen by the routes.
        cluster_key_file: path of the key that all engines of a cluster share; None: no
            authentication.
        encrypt: encrypt all data over tcp by AES-GCM; in effect if either end asks for it.
        heartbeat_interval_ms: ms without a message after which a link sends one.
        heartbeat_timeout_ms: ms without a message from a peer after which its link is broken.
        max_links: largest number of linked peers.
        max_tensors: largest number of tensors of a registered cache.
        comm_port: port of the rendezvous of `link` across hosts.
        comm_dir: directory of the rendezvous of `link` on one host; None: the user's runtime
            directory.
        tuning: tuning of copies on this machine. "auto": as stored by `kvplan tune`, otherwise
            built in; "builtin"; or a JSON object of the fields that differ from the built-in
            tuning, such as {"bypass_nbytes": 16777216}. None: the value of the environment
            variable KVPLAN_TUNING, or "auto". Engines with equal values share their threads.
        unlike_caches: for transfers between caches whose data types, shapes or layouts cannot
            match: "refuse", or "warn" once for each pair and copy the bytes, as the official
            surface does.
        verify: read moved bytes again and compare them with the other side: "off", "all", or
            "sample:1/64" for one of 64 descriptors; each comparison takes time.
        opentelemetry: make a span of OpenTelemetry for each transfer; needs the extra `otel`.
        status_socket: let programs of this user on this host read the state of the engine, as
            `kvplan top` does; idle until a program asks.

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
        """Return the options that differ from `other` as text, each with both values."""
        pairs = [
            (field.name, getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        ]
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
        found = {name: value for name, value in read_file(path).items() if name not in before}
        with naming_sources(found):
            return cls(**given, **values_of(found))

    @classmethod
    def of(cls, options: Mapping[str, str] | Options | None) -> Options:
        """Return `options` as this type; a mapping has the keys of the reference and text values.

        Keys may omit the prefix `llm.`, or `kvplan.` of options that the reference does not have.
        Options of the reference without an effect here are checked and ignored. An unknown key
        causes a warning with the nearest key; one similar to `llm.ListenIpInfo` is refused.

        Raises:
            TypeError: another type, or a key or value that is not text.
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
    """Return the warning of an unknown key, which names the nearest one."""
    plain = re.sub("[^a-z0-9]", "", key.lower().removeprefix("llm.").removeprefix("kvplan."))
    if plain.startswith("listen") or get_close_matches(plain, ["listenipinfo"], cutoff=0.8):
        raise invalid(
            f"option {key!r} is unknown, and without it the engine would listen nowhere; where to "
            f"listen is {OPTION_LISTEN_IP_INFO!r}"
        )
    near = get_close_matches(key, SPELLINGS, n=1, cutoff=0.0)[0]
    return f"option {key!r} is unknown and ignored; the nearest is {near!r}"
