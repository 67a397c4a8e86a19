"""The table of an engine's options, one row each.

To add an option, add a row and run `make options`, which writes the reference page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvplan.control.endpoint import PORT_MAX
from kvplan.device.choice import ACCELERATORS, CUDA_CONTEXTS
from kvplan.engine import option_kinds as kinds
from kvplan.engine.option_kinds import (
    INT32,
    UINT32,
    Kind,
    described,
    number,
    one_of,
    option,
    rows_of,
)
from kvplan.engine.pools import PAGES, PoolConfig
from kvplan.transport.choice import MAX_BUSY_POLL_US, MAX_CONNECTIONS, POPULATE

OPTION_LISTEN_IP_INFO: Final = "llm.ListenIpInfo"
OPTION_DEVICE_ID: Final = "llm.DeviceId"
OPTION_SYNC_CACHE_WAIT_TIME: Final = "llm.SyncKvCacheWaitTime"
OPTION_BUF_POOL_CFG: Final = "llm.BufPoolCfg"
OPTION_ENABLE_SET_ROLE: Final = "llm.EnableSwitchRole"
OPTION_LOCAL_COMM_RES: Final = "llm.LocalCommRes"
OPTION_TRANSFER_BACKEND: Final = "llm.TransferBackend"
OPTION_GLOBAL_RESOURCE_CONFIG: Final = "llm.GlobalResourceConfig"
OPTION_MEM_POOL_CONFIG: Final = "llm.MemPoolConfig"
OPTION_HOST_MEM_POOL_CONFIG: Final = "llm.HostMemPoolConfig"


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class OptionRows:
    """The fields of `kvplan.Options`."""

    # fmt: off
    listen_ip_info: str = option(
        "", kinds.ADDRESS,
        'Address to listen at: "ip:port", "[ipv6]:port", "name:port" or "ipc:///path". Port 0: '
        "any free port. Empty: do not listen.",
        OPTION_LISTEN_IP_INFO, "llm.listenIpInfo")
    advertise: str = option(
        "", kinds.ADVERTISED,
        'Address that peers link to, if it is not the one to listen at: "host", or "host:port" '
        "behind a port mapping. Needed to hand `listen_address` to peers while listening at all "
        "addresses (0.0.0.0). Empty, and for a path: the address to listen at.",
        see="../how-to/containers.md#addresses")
    device_id: int = option(
        0, number(0, INT32[1], INT32),
        "Number of the device of the caches; only a label without an accelerator.",
        OPTION_DEVICE_ID, "ge.exec.deviceId")
    sync_kv_cache_wait_time: int = option(
        1000, number(1, INT32[1], INT32),
        "Time limit of a pull or push.",
        OPTION_SYNC_CACHE_WAIT_TIME, unit="ms")
    mem_pool_config: PoolConfig | None = option(
        None, kinds.POOL,
        'Pool of caches with Placement.DEVICE, `{"memory_size": bytes, "page_shift": 16}`. None: '
        "each cache has memory of its own.",
        OPTION_MEM_POOL_CONFIG)
    host_mem_pool_config: PoolConfig | None = option(
        None, kinds.POOL,
        "The same for Placement.HOST.",
        OPTION_HOST_MEM_POOL_CONFIG)
    prefault: bool = option(
        False, kinds.FLAG,
        "Populate all host memory of a pool, or of a cache without a pool, when it is made. Too "
        "little memory is then an error at once (LLM_OUT_OF_MEMORY), and no first use of a page "
        "takes time or fails. Otherwise the first use populates a page.",
        see="caches.md#prefaulting-and-overcommit")
    allow_overcommit: bool = option(
        False, kinds.FLAG,
        "Allow a pool, or a cache without a pool, larger than all memory and swap of the machine "
        "or the cgroup.",
        see="caches.md#prefaulting-and-overcommit")
    pages: str = option(
        "auto", one_of(PAGES),
        "Pages of host memory of a pool, or of a cache without a pool. `auto`: huge pages of 2 "
        "MiB with `prefault`, as far as available, and where the system gives them anyway; "
        "`collapse`: also without `prefault`, in the background, as memory fills; `hugetlb`: "
        "pages reserved by the administrator (`sysctl vm.nr_hugepages`); `small`: pages of 4 KiB.",
        see="caches.md#pages")
    numa_node: int | str | None = option(
        None, kinds.NODE,
        "NUMA node of that memory, while the node has free memory, and whose processors copy for "
        "this engine if the machine has several nodes. `all`: the threads that copy are spread "
        "over the nodes, and first copy to memory of their own; the system chooses where memory "
        "comes from. None: the system chooses both.",
        see="caches.md#pages")
    populate: str = option(
        "background", one_of(POPULATE),
        "When to map pages of peers' arenas on this host. `background`: a thread maps those that "
        "their owners have filled, soon after linking; `now`: all at once, which allocates "
        "untouched pages; `off`: each at its first use.",
        over=("local",), see="caches.md#pages")
    local_comm_res: str = option(
        "", kinds.JSON,
        "Rank table of only this device, or its ports for HIXL (version 1.3). Empty: the address "
        "of the device is detected.",
        OPTION_LOCAL_COMM_RES, over=("hccl",), see="../how-to/ascend.md")
    global_resource_config: str = option(
        "", kinds.RESOURCES,
        "Resources of the reference. Checked; without an effect except for `connect_pool.*` in "
        "`kvplan.hixl`.",
        OPTION_GLOBAL_RESOURCE_CONFIG)
    link_total_time: int = option(
        0, number(*UINT32),
        "Time in which all members of a `link` must join; 0: 60 s. `link_clusters` has "
        "timeout_ms instead.",
        "llm.LinkTotalTime", unit="s")
    link_retry_count: int = option(
        1, number(1, 100),
        "Number of attempts to connect by `link_clusters`, within its timeout_ms. `link` tries "
        "until its time has passed.",
        "llm.LinkRetryCount")
    rdma_traffic_class: int | None = option(
        None, kinds.TRAFFIC_CLASS,
        "Traffic class of RDMA. None: the default of the system.",
        "llm.RdmaTrafficClass", over=("hccl",))
    rdma_service_level: int | None = option(
        None, number(0, 7, UINT32),
        "Service level of RDMA. None: the default of the system.",
        "llm.RdmaServiceLevel", over=("hccl",))
    accelerator: str = option(
        "auto", one_of(ACCELERATORS),
        "`ascend` or `cuda`: caches with Placement.DEVICE are in memory of that device; `none`: "
        "the placement is a label, and all caches are in host memory; `auto`: the first "
        "accelerator whose library and device are found, otherwise `none`.")
    cuda_context: str = option(
        "primary", one_of(CUDA_CONTEXTS),
        "Context of a CUDA device. `primary`: that of the program's frameworks, whose tensors "
        "can be registered; `own`: errors of their streams do not affect transfers, but their "
        "memory cannot be registered.",
        see="../how-to/cuda.md")
    cuda_batch_calls: bool = option(
        True, kinds.FLAG,
        "False: never call `cuMemcpyBatchAsync`, which is faulty in some drivers; copy by "
        "launches of the kernel, or by single copies.",
        see="../how-to/cuda.md")
    cuda_copy_blocks: int = option(
        0, number(0, 65_535),
        "Maximum number of thread blocks of the copy kernel. A multiprocessor runs 4 of them; the "
        "rest of the GPU is left to the model. 0: 32 from and to the host, 64 within a GPU and "
        "between two.",
        see="../how-to/cuda.md")
    staging_nbytes: int = option(
        32 << 20, number(0, 4 << 30),
        "Device memory to stage memory that HCCL cannot register, 16 KiB at least; 0: none, and "
        "such transfers are refused.",
        unit="bytes", over=("hccl",))
    hixl_address: str = option(
        "", kinds.SOURCE,
        "Address of this host at which HIXL listens for peers, which it does not authenticate; "
        "needed with `llm.LocalCommRes` of version 1.3.",
        over=("hccl",), see="../how-to/ascend.md")
    transport: str = option(
        "auto", Kind(kinds.TEXT.check, values="`auto`, `hccl`, `local`, `ucx`, `tcp`"),
        "Transport to peers. `auto`: the first that works at both ends; `kvplan info` shows "
        "which work here.")
    ucx_devices: str = option(
        "", kinds.UCX_DEVICES,
        'Devices that UCX may use, such as "mlx5_0:1,mlx5_1:1". Empty: UCX chooses.',
        over=("ucx",))
    ucx_settings: str = option(
        "", kinds.UCX_SETTINGS,
        'Settings of UCX, such as {"UCX_IB_GID_INDEX": "3"}; they take precedence. UCX_TLS '
        "selects UCX's transports; without it RDMA is required, and TCP is not used.",
        over=("ucx",), see="../how-to/across-hosts.md#rdma-and-gpu-memory-ucx")
    permit_any_peer: bool = option(
        False, kinds.FLAG,
        "Let every process of this user trace this one. With `kernel.yama.ptrace_scope=1`, as on "
        "Ubuntu, peers need it to reach registered memory.",
        over=("local",), see="caches.md#registering-your-own-memory")
    tcp_connections: int | None = option(
        None, number(1, MAX_CONNECTIONS),
        "Connections to each peer, each with a thread at both ends, which share large transfers; "
        "both ends use the smaller number. None: 1 below 4 cores, 2 from 4 on, 4 from 8 on, 8 "
        "from 16 on.",
        over=("tcp",))
    tcp_congestion: str = option(
        "", kinds.CONGESTION,
        "Congestion control, such as `bbr`, which the kernel must have and permit (`sysctl "
        "net.ipv4.tcp_allowed_congestion_control`). Empty: the default of the system.",
        over=("tcp",))
    tcp_busy_poll_us: int = option(
        0, number(0, MAX_BUSY_POLL_US),
        "Time for which a read that finds no bytes polls the network card instead of waiting for "
        "its interrupt (SO_BUSY_POLL). Some kernels require CAP_NET_ADMIN.",
        over=("tcp",))
    tcp_source: str = option(
        "", kinds.SOURCE,
        "Address of this host for outgoing handshakes, and for data over `tcp`, of the family of "
        "the peers' addresses; `ip rule` can select a network by it. Empty: chosen by the routes.")
    cluster_key_file: str | None = option(
        None, kinds.PATH,
        "The key that all engines of a cluster share. None: the user's own key within the host, "
        "and no authentication across hosts.",
        see="../how-to/operating.md#keys")
    encrypt: bool = option(
        False, kinds.FLAG,
        "Encrypt all data by AES-GCM; in effect if either end asks for it.",
        over=("tcp",))
    heartbeat_interval_ms: int = option(
        1000, number(1, INT32[1]),
        "Silence after which a link sends a heartbeat.",
        unit="ms")
    heartbeat_timeout_ms: int = option(
        5000, number(1, INT32[1]),
        "Silence of a peer after which its link is broken; more than `heartbeat_interval_ms`.",
        unit="ms")
    max_links: int = option(
        512, number(1, 65536),
        "Largest number of linked peers. Each takes 6 file descriptors (`ulimit -n`); over `ucx` "
        "5; over `tcp` 5, and 2 for each connection.")
    max_tensors: int = option(
        240, number(1, UINT32[1]),
        "Largest number of tensors of a registered cache.")
    comm_port: int = option(
        26900, number(0, PORT_MAX),
        "Port where members of a `link` meet across hosts; the device id is added.")
    comm_dir: str | None = option(
        None, kinds.DIRECTORY,
        "Directory where members of a `link` meet on one host. None: the user's runtime "
        "directory.")
    tuning: str | None = option(
        None, kinds.TUNING,
        "Tuning of plain copies on this machine. `auto`: as stored by `kvplan tune`, otherwise "
        "built in; `builtin`: the same on every machine; or a JSON object of the fields that "
        "differ from `builtin`: `threads`, `bypass_nbytes` (from which size on copies bypass the "
        "caches) and `piece_nbytes`. None: `auto`. Engines with equal values share their "
        "threads.")
    unlike_caches: str = option(
        "refuse", one_of(("refuse", "warn")),
        "Transfers between caches whose data types, shapes or layouts cannot match: `refuse` "
        "them, or `warn` once for each pair and copy the bytes, as `llm_datadist` does.",
        see="operations.md#unlike-caches")
    verify: str = option(
        "off", kinds.VERIFY,
        "Read moved bytes again and compare them with the other side: `all`, or `sample:1/64` "
        "for one of 64 descriptors. Each comparison takes time.",
        see="../how-to/verification.md")
    opentelemetry: bool = option(
        False, kinds.FLAG,
        "Make an OpenTelemetry span for each transfer; needs the extra `otel`.",
        see="../how-to/recording.md#opentelemetry")
    status_socket: bool = option(
        True, kinds.FLAG,
        "Let programs of this user on this host read the state of the engine, as `kvplan top` "
        "does, through an abstract Unix socket; idle until a program asks.")
    # fmt: on


ROWS: Final = rows_of(OptionRows, "kvplan.")
"""All options with a field."""

SPELLINGS: Final = {
    spelling: row
    for row in ROWS
    for key in row.keys
    for spelling in (key, key.removeprefix("llm.").removeprefix("kvplan."))
}
"""The row of each spelling of a key."""

LISTENING: Final = frozenset(
    spelling for spelling, row in SPELLINGS.items() if row.field == "listen_ip_info"
)
"""Spellings of the key of the listening address."""

WITHOUT_MEANING: Final[Mapping[str, Kind]] = {
    OPTION_BUF_POOL_CFG: kinds.JSON,
    OPTION_ENABLE_SET_ROLE: kinds.FLAG,
    OPTION_TRANSFER_BACKEND: kinds.BACKEND,
    "llm.ClusterInfo": kinds.TEXT,
    "llm.EnableCacheManager": kinds.FLAG,
    "llm.EnableRemoteCacheAccessible": kinds.FLAG,
    "llm.ListenIp": kinds.TEXT,
    "llm.ListenPort": kinds.TEXT,
    "llm.MemoryUtilization": kinds.TEXT,
    "llm.OutputMaxSize": kinds.TEXT,
    "llm.Role": kinds.TEXT,
    "llm.deployResPath": kinds.TEXT,
}
"""Options of the reference without an effect here; their texts are checked."""


def ignored(key: str, name: str, text: str) -> bool:
    """Return whether `key` is an option of the reference without an effect here.

    `key` may lack the prefix `llm.`; errors call the option `name`.

    Raises:
        LLMException: LLM_PARAM_INVALID: a value that the option cannot have.
    """
    if key.startswith("ge."):
        return True
    kind = WITHOUT_MEANING.get(f"llm.{key.removeprefix('llm.')}")
    if kind is not None:
        kind.check(name, kind.read(name, text))
    return kind is not None
