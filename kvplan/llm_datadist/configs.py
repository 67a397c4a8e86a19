"""Configuration of an engine: its role, its options, and its peers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from kvplan.llm_datadist.utils.utils import (
    Checked,
    Field,
    check_dict,
    check_int32,
    check_isinstance,
    check_uint16,
    check_uint32,
    check_uint64,
    checked_by,
    kind_of,
)
from kvplan.status import invalid
from kvplan.validation import UINT32_MAX, shown

_T = TypeVar("_T")


class LLMRole(IntEnum):
    """The role of a cluster."""

    PROMPT = 1
    DECODER = 2
    MIX = 3

    def __str__(self) -> str:
        return f"LLMRole.{self.name}"


def trans_str_ip(ip: str | int) -> int:
    """Convert an IPv4 address to the little-endian integer of its bytes; integers stay unchanged.

    Raises:
        RuntimeError: a str that is not an IPv4 address.
    """
    if not isinstance(ip, str):
        return ip
    try:
        return int.from_bytes(socket.inet_aton(ip), "little")
    except OSError:
        raise RuntimeError(f"ip={shown(ip)} is not an IPv4 address") from None


def _checked_cluster_info(name: str, text: str) -> str:
    check_isinstance(name, text, str, allow_none=False)
    try:
        cluster = json.loads(text)
        for address in cluster.get("listen_ip_info", ()):
            address["ip"] = trans_str_ip(address["ip"])
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise invalid(
            f'{name}={shown(text)} must be a JSON object, with "ip" in each entry of '
            f'"listen_ip_info": {error!r}'
        ) from None
    return json.dumps(cluster)


def _checked_role_type(name: str, role: LLMRole | int | None) -> LLMRole | int | None:
    return check_isinstance(name, role, [LLMRole, int])


class LLMClusterInfo:
    """A cluster to link with, and the addresses of both ends."""

    remote_cluster_id = Checked[int](checked_by(check_uint64), "Id of the peer; None: not set.")
    remote_role_type = Checked[LLMRole | int | None](
        _checked_role_type, "Role of the peer; not used."
    )
    local_ip_info_list = Field[list[tuple[int, int]]]("Addresses of this process: (ip, port).")
    remote_ip_info_list = Field[list[tuple[int, int]]]("Addresses of the peer: (ip, port).")

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local_ip_info_list: list[tuple[int, int]] = []
        self._remote_ip_info_list: list[tuple[int, int]] = []

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of this process.

        Args:
            ip: IPv4, as str or as the little-endian integer of its bytes.
            port: a uint16.

        Raises:
            TypeError, ValueError: an argument of the wrong type, or port is not a uint16.
            RuntimeError: a str that is not an IPv4 address.
        """
        self._local_ip_info_list.append(_address(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of the peer; arguments as for `append_local_ip_info`.

        Raises:
            TypeError, ValueError: an argument of the wrong type, or port is not a uint16.
            RuntimeError: a str that is not an IPv4 address.
        """
        self._remote_ip_info_list.append(_address(ip, port))


def _address(ip: str | int, port: int) -> tuple[int, int]:
    check_isinstance("ip", ip, [str, int])
    check_uint16("port", port)
    return trans_str_ip(ip), port


class _Setting(Checked[_T]):
    """A property that becomes an option: the first key gets all values, the others only one."""

    def __init__(
        self,
        keys: str | tuple[str, ...],
        check: Callable[[str, _T], _T],
        doc: str,
        initial: Any = None,
        none: Any = None,
    ) -> None:
        super().__init__(check, doc)
        self._keys = (keys,) if isinstance(keys, str) else keys
        self._initial = initial  # of an unset property; if falsy, the option is omitted
        self._none = none  # returned for None

    def _held(self, config: Any) -> Any:
        return vars(config).get(self._attribute, self._initial)

    def _read(self, config: Any) -> Any:
        held = self._held(config)
        return self._none if held is None else held

    def written(self, config: object) -> dict[str, str]:
        """Return this property of `config` as options; {} for None, and for a falsy default."""
        held = self._held(config)
        if held is None or (held == self._initial and not held):
            return {}
        values = held if isinstance(held, list | tuple) else [held]
        if not values:
            raise invalid(f"{self.name}={held} is empty; give at least one value")
        texts = [str(int(value) if isinstance(value, bool) else value) for value in values]
        return {
            key: texts[0] if position else ";".join(texts)
            for position, key in enumerate(self._keys)
        }


_check_text = kind_of(str, allow_none=True)
_check_bool = kind_of(bool, allow_none=True)
_checked_int = kind_of(int, allow_none=True)


def _within(low: int, high: int) -> Callable[[str, int], int]:
    """Return a check for an int in [low, high]."""

    def check(name: str, value: int) -> int:
        check_isinstance(name, value, int, allow_none=False)
        if not low <= value <= high:
            raise invalid(f"{name}={value} is out of range [{low}, {high}]")
        return value

    return check


def _checked_fraction(name: str, value: float) -> float:
    """Check a float in [0, 1]."""
    check_isinstance(name, value, float, allow_none=False)
    if not 0.0 <= value <= 1.0:
        raise invalid(f"{name}={value} is out of range [0, 1]")
    return value


def _checked_ge_options(name: str, options: dict[str, str]) -> dict[str, str]:
    """Check a dict of str."""
    check_isinstance(name, options, dict, allow_none=False)
    check_dict(name, options, str, str)
    return options


def _checked_device_id(
    name: str, device_id: int | list[int] | tuple[int, ...]
) -> int | list[int] | tuple[int, ...]:
    """Check an int32 >= 0, or a list of them."""
    check_isinstance(name, device_id, [list, tuple, int], allow_none=False)
    ids = device_id if isinstance(device_id, list | tuple) else [device_id]
    check_isinstance(name, ids, [list, tuple], int)
    for one in ids:
        if one < 0:
            raise invalid(f"{name}={shown(device_id)} is out of range [0, 2**31)")
    for one in ids:
        check_int32(name, one)
    return device_id


def _checked_timeout(name: str, timeout: int | str) -> int | str:
    """Check an int32 > 0, or a str of its digits."""
    check_isinstance(name, timeout, [int, str], allow_none=False)
    if isinstance(timeout, str) and not timeout.isdecimal():
        raise invalid(f"{name}={shown(timeout)} must be milliseconds, in digits")
    if int(timeout) <= 0:
        raise invalid(f"{name}={shown(timeout)} is out of range [1, 2**31)")
    check_int32(name, int(timeout))
    return timeout


class LlmConfig:
    """The options of an engine, each with its checks.

    Setting an option raises TypeError for another type, RuntimeError for an invalid address in
    `cluster_info`, and ValueError or LLMException (LLM_PARAM_INVALID) for other invalid values.
    """

    ge_options = _Setting[dict[str, str]](
        (), _checked_ge_options, "Options by their keys; merged first."
    )
    device_id = _Setting[int | list[int] | tuple[int, ...]](
        ("ge.exec.deviceId", "ge.session_device_id"),
        _checked_device_id,
        "Id of the device, or a list of ids.",
    )
    sync_kv_timeout = _Setting[int | str](
        "llm.SyncKvCacheWaitTime", _checked_timeout, "Timeout of a transfer, in ms, > 0."
    )
    deploy_res_path = _Setting[str | None]("llm.deployResPath", _check_text, "Not used.", "")
    buf_pool_cfg = _Setting[str | None](
        "llm.BufPoolCfg", _check_text, "JSON: sizes of transfer buffers; not used.", ""
    )
    mem_pool_cfg = _Setting[str | None](
        "llm.MemPoolConfig", _check_text, 'JSON: {"memory_size": bytes, "page_shift": 16}.', ""
    )
    host_mem_pool_cfg = _Setting[str | None](
        "llm.HostMemPoolConfig", _check_text, "Like `mem_pool_cfg`, for Placement.HOST.", ""
    )
    enable_cache_manager = _Setting[bool | None](
        "llm.EnableCacheManager", _check_bool, "True to have a `cache_manager`.", none=False
    )
    enable_remote_cache_accessible = _Setting[bool | None](
        "llm.EnableRemoteCacheAccessible", _check_bool, "True for remote mode.", none=False
    )
    listen_ip_info = _Setting[str | None](
        "llm.listenIpInfo", _check_text, '"ip:port" to listen at.', ""
    )
    link_total_time = _Setting[int](
        "llm.LinkTotalTime", _within(0, UINT32_MAX), "Timeout of linking, in seconds.", none=0
    )
    link_retry_count = _Setting[int](
        "llm.LinkRetryCount", _within(1, 100), "Attempts to link.", none=1
    )
    rdma_traffic_class = _Setting[int | None](
        "llm.RdmaTrafficClass", checked_by(check_uint32), "Traffic class of RDMA; None: unset."
    )
    rdma_service_level = _Setting[int | None](
        "llm.RdmaServiceLevel", checked_by(check_uint32), "Service level of RDMA; None: unset."
    )
    local_comm_res = _Setting[str | None](
        "llm.LocalCommRes",
        _check_text,
        'JSON: resources to link over; "": detect them.',
        none="",
    )
    transfer_backend = _Setting[str | None](
        "llm.TransferBackend", _check_text, '"hixl" or nothing.', none=""
    )
    global_resource_config = _Setting[str | None](
        "llm.GlobalResourceConfig", _check_text, "JSON: resources of all links; not used.", none=""
    )
    cluster_info = _Setting[str](
        "llm.ClusterInfo", _checked_cluster_info, "JSON: this cluster; not used.", ""
    )
    output_max_size = _Setting[int | None]("llm.OutputMaxSize", _checked_int, "Not used.")
    enable_switch_role = _Setting[bool | None](
        "llm.EnableSwitchRole", _check_bool, "True to permit changes of the role; not used.", False
    )
    mem_utilization = _Setting[float](
        "llm.MemoryUtilization", _checked_fraction, "Fraction of memory, in [0, 1]; not used.", 0.95
    )
    options = Field[dict[str, str]]("The dict that `generate_options` fills.")

    def __init__(self) -> None:
        self._options: dict[str, str] = {}
        self.ge_options = dict[str, str]()

    def generate_options(self) -> dict[str, str]:
        """Return the options by their keys, for `LLMDataDist.init`.

        Each call updates and returns the same dict; its other keys stay.

        Raises:
            LLMException: LLM_PARAM_INVALID: an empty list of devices.
        """
        return self.gen_options()

    def gen_options(self) -> dict[str, str]:
        """See `generate_options`."""
        self._options.update(self.ge_options)
        for setting in vars(LlmConfig).values():
            if isinstance(setting, _Setting):
                self._options.update(setting.written(self))
        return self._options


LLMConfig = LlmConfig
