"""The table of options: keys, parser and check of each."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

from kvplan.device.choice import ACCELERATORS, CUDA_CONTEXTS
from kvplan.engine.numa import MAX_NODE
from kvplan.engine.pools import PAGES, PoolConfig
from kvplan.execution.tuning import check_choice as check_tuning_choice
from kvplan.execution.verification import verify_every
from kvplan.status import invalid
from kvplan.transport.choice import (
    MAX_CONNECTIONS,
    POPULATE,
    check_devices,
    check_settings,
)
from kvplan.validation import UINT32_MAX, check_one_of, check_type, check_width, shown

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

_INT32_MAX = 2**31 - 1
_PORT_MAX = 65535
_INT32 = (-(2**31), _INT32_MAX)
_UINT32 = (0, UINT32_MAX)
_RESOURCES = {  # keys of the global resource config with their smallest and largest value
    "channel_pool.max_channel": (1, 512),
    "comm_resource_config.listen_port": (1, _PORT_MAX),
    "comm_resource_config.max_active_channels": (1, 8192),
    "comm_resource_config.qos": (0, 7),
    "connect_pool.task_queue_capacity": (1, 65535),
    "connect_pool.thread_num": (1, 64),
    "fabric_memory.max_capacity": (1, 1024),
    "fabric_memory.start_address": (0, 1024),
    "fabric_memory.task_stream_num": (1, 8),
    "transfer_config.max_transfer_count_per_batch": (1, 32766),
}
_RESOURCE_FILE = "local_comm_res_path"
_MAX_RESOURCE_FILE_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table of options.

    Attributes:
        field: the field of `Options`.
        keys: keys in a mapping of options; errors name the first.
        read: returns the value of a text; called with the key and the text.
        check: refuses an invalid value; called with the name and the value.
        optional: whether the value may be None.
    """

    field: str
    keys: tuple[str, ...]
    read: Callable[[str, str], Any]
    check: Callable[[str, Any], object]
    optional: bool = False

    @property
    def is_flag(self) -> bool:
        """Whether the value is a bool."""
        return self.read is _flag


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if not low <= check_type(name, value, int) <= high:
        raise invalid(f"{name}={value} is out of range [{low}, {high}]")


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise invalid(f"{name}={shown(text)} must be one whole number")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise invalid(f'{name}={shown(text)} must be "0" or "1"')
    return text == "1"


def _text(name: str, text: str) -> str:
    return text


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name}={shown(text)} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise invalid(f"{name}={shown(text)} must be a JSON object")
    return document


def _number(
    name: str, *keys: str, low: int, high: int, width: tuple[int, int] | None = None
) -> Row:
    def check(shown_name: str, value: object) -> None:
        if width is not None:
            check_width(shown_name, value, *width)
        _check_range(shown_name, value, low, high)

    return Row(name, keys, _whole, check)


def _string(name: str, *keys: str, optional: bool = False) -> Row:
    return Row(name, keys, _text, lambda name, value: check_type(name, value, str), optional)


def _word(name: str, key: str, allowed: Collection[str]) -> Row:
    return Row(name, (key,), _text, lambda name, value: check_one_of(name, value, allowed))


def _check_json(name: str, value: object) -> None:
    if text := check_type(name, value, str):
        _json_object(name, text)


def _check_resources(name: str, value: object) -> None:
    text = check_type(name, value, str)
    given = _json_object(name, text) if text else {}
    for key in given.keys() & _RESOURCES.keys():
        number, (low, high) = given[key], _RESOURCES[key]
        if isinstance(number, str):  # a number or its digits
            number = _whole(key, number)
        if type(number) is not int or not low <= number <= high:
            raise invalid(f"{key}={shown(number)} of {name} is out of range [{low}, {high}]")


def check_resource_file(name: str, resources: str) -> None:
    """Refuse a local_comm_res_path of the global resource config that is not a small file.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    given = _json_object(name, resources) if resources else {}
    if _RESOURCE_FILE not in given:
        return
    name, path = f"{_RESOURCE_FILE} of {name}", given[_RESOURCE_FILE]
    if not isinstance(path, str) or not path:
        raise invalid(f"{name}={shown(path)} must be the path of a file")
    try:
        status = Path(path).stat()
    except (OSError, ValueError) as error:
        raise invalid(f"{name}={shown(path)} cannot be read: {error}") from None
    if not S_ISREG(status.st_mode) or not 1 <= status.st_size <= _MAX_RESOURCE_FILE_NBYTES:
        raise invalid(
            f"{name}={shown(path)} must be a regular file of [1, {_MAX_RESOURCE_FILE_NBYTES}] "
            f"bytes; it has {status.st_size}"
        )


def _boolean(name: str, key: str) -> Row:
    return Row(name, (key,), _flag, lambda name, value: check_type(name, value, bool))


def _pool_config(name: str, text: str) -> PoolConfig | None:
    if not text:
        return None
    given = _json_object(name, text)
    if "memory_size" not in given or given.keys() - {"memory_size", "page_shift"}:
        raise invalid(f"{name}={shown(text)} must have memory_size, and may have page_shift")
    try:
        return PoolConfig(**given)
    except TypeError as error:
        raise invalid(f"{name}={shown(text)}: {error}") from None


def _pool(name: str, key: str) -> Row:
    return Row(
        name,
        (key,),
        _pool_config,
        lambda name, value: check_type(name, value, PoolConfig),
        optional=True,
    )


def _check_address(name: str, value: object) -> None:
    """Refuse a malformed address; the listener finds out whether the address exists."""
    text = check_type(name, value, str)
    if not text or text.startswith("ipc://"):
        return
    host, _, port = text.rpartition(":")
    if ";" in text or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > _PORT_MAX:
        raise invalid(
            f'{name}={shown(text)} must be one address, "ip:port" with port in [0, {_PORT_MAX}]'
        )


def _check_source(name: str, value: object) -> None:
    text = check_type(name, value, str)
    try:
        if text:
            ipaddress.ip_address(text)
    except ValueError:
        raise invalid(f"{name}={shown(text)} must be empty or an IP address of this host") from None


def _check_backend(name: str, value: object) -> None:
    if check_type(name, value, str) not in ("", "hixl"):
        raise invalid(f'{name}={shown(value)} must be empty or "hixl"')


def _check_unlike(name: str, value: object) -> None:
    if check_type(name, value, str) not in ("refuse", "warn"):
        raise invalid(f'{name}={shown(value)} must be "refuse" or "warn"')


def _check_verify(name: str, value: object) -> None:
    try:
        verify_every(check_type(name, value, str))
    except ValueError:
        raise invalid(
            f'{name}={shown(value)} must be "off", "all" or such as "sample:1/64"'
        ) from None


def _check_congestion(name: str, value: object) -> None:
    """Refuse a malformed name; the kernel finds out whether the name exists."""
    if not re.fullmatch("[a-z0-9_-]{0,15}", check_type(name, value, str)):
        raise invalid(f'{name}={shown(value)} must be a name such as "cubic" or "bbr", or empty')


def _check_traffic_class(name: str, value: object) -> None:
    number = check_width(name, value, *_UINT32)
    if number > 255 or number % 4:
        raise invalid(f"{name}={number} must be a multiple of 4 in [0, 255]")


ROWS: Final = (
    Row("listen_ip_info", (OPTION_LISTEN_IP_INFO, "llm.listenIpInfo"), _text, _check_address),
    _number(
        "device_id", OPTION_DEVICE_ID, "ge.exec.deviceId", low=0, high=_INT32_MAX, width=_INT32
    ),
    _number(
        "sync_kv_cache_wait_time", OPTION_SYNC_CACHE_WAIT_TIME, low=1, high=_INT32_MAX, width=_INT32
    ),
    _pool("mem_pool_config", OPTION_MEM_POOL_CONFIG),
    _pool("host_mem_pool_config", OPTION_HOST_MEM_POOL_CONFIG),
    Row("local_comm_res", (OPTION_LOCAL_COMM_RES,), _text, _check_json),
    Row("global_resource_config", (OPTION_GLOBAL_RESOURCE_CONFIG,), _text, _check_resources),
    _boolean("prefault", "kvplan.prefault"),
    _boolean("allow_overcommit", "kvplan.allow_overcommit"),
    _word("pages", "kvplan.pages", PAGES),
    Row(
        "numa_node",
        ("kvplan.numa_node",),
        _whole,
        _number("", low=0, high=MAX_NODE).check,
        optional=True,
    ),
    _word("populate", "kvplan.populate", POPULATE),
    _number("link_total_time", "llm.LinkTotalTime", low=0, high=UINT32_MAX),
    _number("link_retry_count", "llm.LinkRetryCount", low=1, high=100),
    Row(
        "rdma_traffic_class", ("llm.RdmaTrafficClass",), _whole, _check_traffic_class, optional=True
    ),
    Row(
        "rdma_service_level",
        ("llm.RdmaServiceLevel",),
        _whole,
        _number("", low=0, high=7, width=_UINT32).check,
        optional=True,
    ),
    _word("accelerator", "kvplan.accelerator", ACCELERATORS),
    _word("cuda_context", "kvplan.cuda_context", CUDA_CONTEXTS),
    _number("staging_nbytes", "kvplan.staging_nbytes", low=0, high=64 << 30),
    _string("transport", "kvplan.transport"),
    Row("ucx_devices", ("kvplan.ucx_devices",), _text, check_devices),
    Row("ucx_settings", ("kvplan.ucx_settings",), _text, check_settings),
    _boolean("permit_any_peer", "kvplan.permit_any_peer"),
    Row(
        "tcp_connections",
        ("kvplan.tcp_connections",),
        _whole,
        _number("", low=1, high=MAX_CONNECTIONS).check,
        optional=True,
    ),
    Row("tcp_congestion", ("kvplan.tcp_congestion",), _text, _check_congestion),
    Row("tcp_source", ("kvplan.tcp_source",), _text, _check_source),
    _string("cluster_key_file", "kvplan.cluster_key_file", optional=True),
    _boolean("encrypt", "kvplan.encrypt"),
    _number("heartbeat_interval_ms", "kvplan.heartbeat_interval_ms", low=1, high=_INT32_MAX),
    _number("heartbeat_timeout_ms", "kvplan.heartbeat_timeout_ms", low=1, high=_INT32_MAX),
    _number("max_links", "kvplan.max_links", low=1, high=65536),
    _number("max_tensors", "kvplan.max_tensors", low=1, high=UINT32_MAX),
    _number("comm_port", "kvplan.comm_port", low=0, high=_PORT_MAX),
    _string("comm_dir", "kvplan.comm_dir", optional=True),
    Row("tuning", ("kvplan.tuning",), _text, check_tuning_choice, optional=True),
    Row("unlike_caches", ("kvplan.unlike_caches",), _text, _check_unlike),
    Row("verify", ("kvplan.verify",), _text, _check_verify),
    _boolean("opentelemetry", "kvplan.opentelemetry"),
    _boolean("status_socket", "kvplan.status_socket"),
)
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

WITHOUT_MEANING: Final[Mapping[str, Callable[[str, str], object]]] = {
    OPTION_BUF_POOL_CFG: _check_json,
    OPTION_ENABLE_SET_ROLE: _flag,
    OPTION_TRANSFER_BACKEND: _check_backend,
    "llm.ClusterInfo": _text,
    "llm.EnableCacheManager": _flag,
    "llm.EnableRemoteCacheAccessible": _flag,
    "llm.ListenIp": _text,
    "llm.ListenPort": _text,
    "llm.MemoryUtilization": _text,
    "llm.OutputMaxSize": _text,
    "llm.Role": _text,
    "llm.deployResPath": _text,
}
"""Options of the reference without an effect here, with the checks of their texts."""


def ignored(key: str, name: str, text: str) -> bool:
    """Return whether `key` is an option of the reference without an effect here.

    `key` may lack the prefix `llm.`; errors call the option `name`.

    Raises:
        LLMException: LLM_PARAM_INVALID: a value that the option cannot have.
    """
    if key.startswith("ge."):
        return True
    check = WITHOUT_MEANING.get(f"llm.{key.removeprefix('llm.')}")
    if check is not None:
        check(name, text)
    return check is not None
