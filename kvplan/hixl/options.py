"""Names of engines and options, as `Hixl.initialize` reads them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvplan.control.endpoint import Endpoint
from kvplan.device.choice import current_device
from kvplan.engine.option_rows import OPTION_GLOBAL_RESOURCE_CONFIG, SPELLINGS
from kvplan.engine.option_sources import configured
from kvplan.engine.options import Options
from kvplan.hixl.values import (
    OPTION_AUTO_CONNECT,
    OPTION_BUFFER_POOL,
    OPTION_ENABLE_USE_FABRIC_MEM,
    OPTION_LOCAL_COMM_RES,
    OPTION_RDMA_SERVICE_LEVEL,
    OPTION_RDMA_TRAFFIC_CLASS,
)
from kvplan.hixl.values import OPTION_GLOBAL_RESOURCE_CONFIG as OPTION_RESOURCES
from kvplan.status import invalid
from kvplan.system.logs import Log
from kvplan.validation import check_one_of, shown

_log = Log("kvplan.hixl")

OPTION_MEM_DEVICE: Final = "kvplan.mem_device"
"""Option: "refuse" (default), or "host" to treat MEM_DEVICE as host memory without a device."""

ENVIRONMENT_MEM_DEVICE: Final = "KVPLAN_MEM_DEVICE"
"""Environment variable for engines that do not give that option."""

MEM_DEVICE_VALUES: Final = ("refuse", "host")

_THREADS: Final = 2
_CAPACITY: Final = 128

# Options of the original that the engine has under other names.
_SAME: Final = {
    OPTION_RDMA_TRAFFIC_CLASS: "llm.RdmaTrafficClass",
    OPTION_RDMA_SERVICE_LEVEL: "llm.RdmaServiceLevel",
    OPTION_LOCAL_COMM_RES: "llm.LocalCommRes",
    OPTION_RESOURCES: OPTION_GLOBAL_RESOURCE_CONFIG,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a `Hixl`.

    Attributes:
        name: of the engine, as given.
        cluster_id: of the engine below; of one that listens it follows from the name.
        engine: options of the engine below.
        auto_connect: True if a transfer connects.
        device_is_host: True if MEM_DEVICE is host memory on a host without a device.
        threads: maximum number of threads for asynchronous connects.
        capacity: maximum number of waiting asynchronous connects.
    """

    name: str
    cluster_id: int
    engine: Options
    auto_connect: bool
    device_is_host: bool
    threads: int
    capacity: int


def read(local_engine: str, options: Mapping[str, str]) -> Settings:
    """Read the arguments of `Hixl.initialize`."""
    listen = own_endpoint(local_engine)
    texts: dict[str, str] = {}
    for key, text in options.items():
        bare = key.removeprefix("adxl.")
        if bare in _SAME:
            texts[_SAME[bare]] = text
        elif bare in (OPTION_AUTO_CONNECT, OPTION_ENABLE_USE_FABRIC_MEM):
            if text not in ("0", "1"):
                raise invalid(f'{key}={shown(text)} must be "0" or "1"')
        elif bare == OPTION_BUFFER_POOL:
            _check_buffer_pool(key, text)
        elif key == OPTION_MEM_DEVICE:
            check_one_of(key, text, MEM_DEVICE_VALUES)
        elif key in SPELLINGS:
            texts[key] = text
        else:
            _log.warning("option %s=%s is unknown and ignored", shown(key), shown(text))
    if _given(options, OPTION_ENABLE_USE_FABRIC_MEM) == "1":
        if (pool := _given(options, OPTION_BUFFER_POOL)) not in (None, "", "0:0"):
            raise invalid(f'BufferPool={shown(pool)} must be "0:0" with EnableUseFabricMem=1')
        _log.warning("option EnableUseFabricMem=1 is ignored: this host has no fabric memory")
    engine = Options.of(texts)
    if listen is not None:
        engine = replace(engine, listen_ip_info=str(listen))
    if "device_id" not in {SPELLINGS[key].field for key in texts} | configured().keys():
        # As in the original: the current device of the program.
        engine = replace(engine, device_id=current_device(engine.accelerator) or 0)
    resources = engine.global_resource_config
    return Settings(
        name=local_engine,
        cluster_id=secrets.randbits(64) if listen is None else cluster_id_of(listen),
        engine=engine,
        auto_connect=_given(options, OPTION_AUTO_CONNECT) == "1",
        device_is_host=_mem_device(options) == "host",
        threads=_number(resources, "connect_pool.thread_num", _THREADS),
        capacity=_number(resources, "connect_pool.task_queue_capacity", _CAPACITY),
    )


def _given(options: Mapping[str, str], name: str) -> str | None:
    """Return the text of an option by either of its keys; None if it is not given."""
    return options.get(name, options.get(f"adxl.{name}"))


def _mem_device(options: Mapping[str, str]) -> str:
    text = options.get(OPTION_MEM_DEVICE)
    if text is None:
        text = os.environ.get(ENVIRONMENT_MEM_DEVICE) or MEM_DEVICE_VALUES[0]
        check_one_of(ENVIRONMENT_MEM_DEVICE, text, MEM_DEVICE_VALUES)
    return text


def own_endpoint(local_engine: str) -> Endpoint | None:
    """Return where an engine of this name listens; None without a port, or with one below 1."""
    host, port = _split(local_engine, "local_engine")
    if port is None or port < 1:
        Endpoint.parse(f"{host}:0")
        return None
    return Endpoint.parse(f"{host}:{port}")


def peer_endpoint(remote_engine: str) -> Endpoint:
    """Return where a remote engine of this name listens."""
    host, port = _split(remote_engine, "remote_engine")
    if port is None or port < 1:
        raise invalid(f"remote_engine={shown(remote_engine)} has no port; give host:port")
    return Endpoint.parse(f"{host}:{port}")


def cluster_id_of(endpoint: Endpoint) -> int:
    """Return the cluster id of the engine that listens there; it follows from the name."""
    digest = hashlib.blake2b(f"hixl {endpoint}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _split(name: str, argument: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(\[[^\]\s]+\]|[^\[\]:\s]+)(?::(-?[0-9]{1,9}))?", name)
    if found is None:
        raise invalid(
            f"{argument}={shown(name)} must be 'host:port', 'host', '[ipv6]:port' or '[ipv6]'"
        )
    host, port = found.groups()
    return host, None if port is None else int(port)


def _check_buffer_pool(key: str, text: str) -> None:
    """Check the size of the original's staging memory; kvplan sizes its own."""
    if text and not re.fullmatch(r"[0-9]{1,6}:[0-9]{1,6}", text):
        raise invalid(f'{key}={shown(text)} must be "number:size in MB", such as "4:8" or "0:0"')


def _number(resources: str, name: str, default: int) -> int:
    """Return a number of the global resource config, which `Options` has checked."""
    return int((json.loads(resources) if resources else {}).get(name, default))
