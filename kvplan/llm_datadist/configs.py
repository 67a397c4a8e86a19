"""What an engine is told before it begins: its role, its options, and its peers."""

from __future__ import annotations

import json
import socket
from enum import IntEnum

from kvplan.llm_datadist.fields import Checked, Field, checked_by
from kvplan.llm_datadist.settings import (
    Setting,
    check_bool,
    check_text,
    checked_device_id,
    checked_fraction,
    checked_ge_options,
    checked_int,
    checked_timeout,
    within,
)
from kvplan.llm_datadist.utils.utils import (
    check_isinstance,
    check_uint16,
    check_uint32,
    check_uint64,
)
from kvplan.status import invalid
from kvplan.validation import UINT32_MAX, shown


class LLMRole(IntEnum):
    """What a cluster does."""

    PROMPT = 1
    DECODER = 2
    MIX = 3

    def __str__(self) -> str:
        return f"LLMRole.{self.name}"


def trans_str_ip(ip: str | int) -> int:
    """Return an IPv4 address as the little-endian integer of its bytes; an integer as it is.

    Raises:
        RuntimeError: a text that is no IPv4 address.
    """
    if not isinstance(ip, str):
        return ip
    try:
        return int.from_bytes(socket.inet_aton(ip), "little")
    except OSError:
        raise RuntimeError(f"ip={shown(ip)} is no IPv4 address") from None


def _checked_cluster_info(name: str, text: str) -> str:
    check_isinstance(name, text, str, allow_none=False)
    try:
        cluster = json.loads(text)
        for address in cluster.get("listen_ip_info", ()):
            address["ip"] = trans_str_ip(address["ip"])
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise invalid(
            f'{name}={shown(text)} must be a JSON object, with "ip" in each of its '
            f'"listen_ip_info", if any: {error!r}'
        ) from None
    return json.dumps(cluster)


def _checked_role_type(name: str, role: LLMRole | int | None) -> LLMRole | int | None:
    return check_isinstance(name, role, [LLMRole, int])


class LLMClusterInfo:
    """A cluster to link with, and where both ends are."""

    remote_cluster_id = Checked[int](checked_by(check_uint64), "Id of the peer; None: not set.")
    remote_role_type = Checked[LLMRole | int | None](_checked_role_type, "Its role; not used.")
    local_ip_info_list = Field[list[tuple[int, int]]]("(ip, port) of this end.")
    remote_ip_info_list = Field[list[tuple[int, int]]]("(ip, port) of the peer.")

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local_ip_info_list: list[tuple[int, int]] = []
        self._remote_ip_info_list: list[tuple[int, int]] = []

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of this end.

        Args:
            ip: IPv4, as text or as the little-endian integer of its bytes.
            port: of it.

        Raises:
            TypeError, ValueError: an argument of another type, or port is no uint16.
            RuntimeError: a text that is no IPv4 address.
        """
        self._local_ip_info_list.append(_address(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of the peer; arguments and errors as of `append_local_ip_info`."""
        self._remote_ip_info_list.append(_address(ip, port))


def _address(ip: str | int, port: int) -> tuple[int, int]:
    check_isinstance("ip", ip, [str, int])
    check_uint16("port", port)
    return trans_str_ip(ip), port


class LlmConfig:
    """The options of an engine, each with its checks.

    Setting one raises TypeError for another type, ValueError for an integer outside its width, and
    LLMException (LLM_PARAM_INVALID) for what breaks another rule.
    """

    ge_options = Setting[dict[str, str]](
        (), checked_ge_options, "Options by their keys; merged first."
    )
    device_id = Setting[int | list[int] | tuple[int, ...]](
        ("ge.exec.deviceId", "ge.session_device_id"),
        checked_device_id,
        "Of the device, or of several.",
    )
    sync_kv_timeout = Setting[int | str](
        "llm.SyncKvCacheWaitTime", checked_timeout, "Milliseconds that a transfer may take, > 0."
    )
    deploy_res_path = Setting[str | None]("llm.deployResPath", check_text, "Not used.", "")
    buf_pool_cfg = Setting[str | None](
        "llm.BufPoolCfg", check_text, "JSON: sizes of transfer buffers.", ""
    )
    mem_pool_cfg = Setting[str | None](
        "llm.MemPoolConfig", check_text, 'JSON: {"memory_size": bytes, "page_shift": 16}.', ""
    )
    host_mem_pool_cfg = Setting[str | None](
        "llm.HostMemPoolConfig", check_text, "As `mem_pool_cfg`, for Placement.HOST.", ""
    )
    enable_cache_manager = Setting[bool | None](
        "llm.EnableCacheManager", check_bool, "Whether there is a `cache_manager`.", none=False
    )
    enable_remote_cache_accessible = Setting[bool | None](
        "llm.EnableRemoteCacheAccessible", check_bool, "Whether it is remote mode.", none=False
    )
    listen_ip_info = Setting[str | None](
        "llm.listenIpInfo", check_text, '"ip:port" to listen at.', ""
    )
    link_total_time = Setting[int](
        "llm.LinkTotalTime", within(0, UINT32_MAX), "Seconds that linking may take.", none=0
    )
    link_retry_count = Setting[int](
        "llm.LinkRetryCount", within(1, 100), "Attempts to link.", none=1
    )
    rdma_traffic_class = Setting[int | None](
        "llm.RdmaTrafficClass", checked_by(check_uint32), "Of RDMA; not used."
    )
    rdma_service_level = Setting[int | None](
        "llm.RdmaServiceLevel", checked_by(check_uint32), "Of RDMA; not used."
    )
    local_comm_res = Setting[str | None](
        "llm.LocalCommRes", check_text, 'JSON: what to link over; "": to be found out.', none=""
    )
    transfer_backend = Setting[str | None](
        "llm.TransferBackend", check_text, '"hixl" or nothing.', none=""
    )
    global_resource_config = Setting[str | None](
        "llm.GlobalResourceConfig", check_text, "JSON: resources of all links.", none=""
    )
    cluster_info = Setting[str](
        "llm.ClusterInfo", _checked_cluster_info, "JSON: this cluster; not used.", ""
    )
    output_max_size = Setting[int | None]("llm.OutputMaxSize", checked_int, "Not used.")
    enable_switch_role = Setting[bool | None](
        "llm.EnableSwitchRole", check_bool, "Whether the role may change.", False
    )
    mem_utilization = Setting[float](
        "llm.MemoryUtilization", checked_fraction, "Fraction of memory to use, in [0, 1].", 0.95
    )
    options = Field[dict[str, str]]("What `generate_options` has filled.")

    def __init__(self) -> None:
        self._options: dict[str, str] = {}
        self.ge_options = {}

    def generate_options(self) -> dict[str, str]:
        """Return the options by their keys, as `LLMDataDist.init` takes them.

        It is one dict, which each call fills anew: what was put into it stays.

        Raises:
            LLMException: LLM_PARAM_INVALID: an empty list of devices.
        """
        return self.gen_options()

    def gen_options(self) -> dict[str, str]:
        """The same as `generate_options`."""
        self._options.update(self.ge_options)
        for setting in vars(LlmConfig).values():
            if isinstance(setting, Setting):
                self._options.update(setting.written(self))
        return self._options


LLMConfig = LlmConfig
"""The same."""
