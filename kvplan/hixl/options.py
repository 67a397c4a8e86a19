"""What a `Hixl` is initialized with: names of engines, and options."""

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
"""Option: what MEM_DEVICE means where there is no device: "refuse" (the default) or "host"."""

ENVIRONMENT_MEM_DEVICE: Final = "KVPLAN_MEM_DEVICE"
"""Environment variable with that value, for engines that do not give the option."""

MEM_DEVICE_VALUES: Final = ("refuse", "host")

_THREADS: Final = 2
_CAPACITY: Final = 128

# Options of the original that the engine has, under its own names.
_SAME: Final = {
    OPTION_RDMA_TRAFFIC_CLASS: "llm.RdmaTrafficClass",
    OPTION_RDMA_SERVICE_LEVEL: "llm.RdmaServiceLevel",
    OPTION_LOCAL_COMM_RES: "llm.LocalCommRes",
    OPTION_RESOURCES: OPTION_GLOBAL_RESOURCE_CONFIG,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """How a `Hixl` works.

    Attributes:
        name: of the engine, as it was given.
        cluster_id: of the engine below: all who know the name of one that listens know it.
        engine: options of the engine below.
        auto_connect: whether a transfer connects.
        device_is_host: True if MEM_DEVICE is host memory where there is no device.
        threads: of asynchronous connects.
        capacity: how many of them may wait.
    """

    name: str
    cluster_id: int
    engine: Options
    auto_connect: bool
    device_is_host: bool
    threads: int
    capacity: int


def read(local_engine: str, options: Mapping[str, str]) -> Settings:
    """Return what the arguments of `Hixl.initialize` mean."""
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
            _log.warning("option %s=%s is not known, and ignored", shown(key), shown(text))
    if _given(options, OPTION_ENABLE_USE_FABRIC_MEM) == "1":
        if (pool := _given(options, OPTION_BUFFER_POOL)) not in (None, "", "0:0"):
            raise invalid(f'BufferPool={shown(pool)} must be "0:0" with EnableUseFabricMem=1')
        _log.warning(
            "option EnableUseFabricMem=1 is ignored: there is no fabric memory here; bytes move as "
            "they would without it"
        )
    engine = Options.of(texts)
    if listen is not None:
        engine = replace(engine, listen_ip_info=str(listen))
    if "device_id" not in {SPELLINGS[key].field for key in texts} | configured().keys():
        # As in the original: the device that the program has set before.
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
    """Return the text of an option by either of its keys, None where it is not given."""
    return options.get(name, options.get(f"adxl.{name}"))


def _mem_device(options: Mapping[str, str]) -> str:
    text = options.get(OPTION_MEM_DEVICE)
    if text is None:
        text = os.environ.get(ENVIRONMENT_MEM_DEVICE) or MEM_DEVICE_VALUES[0]
        check_one_of(ENVIRONMENT_MEM_DEVICE, text, MEM_DEVICE_VALUES)
    return text


def own_endpoint(local_engine: str) -> Endpoint | None:
    """Where an engine of this name listens; None: nowhere, as it has no port, or one below 1."""
    host, port = _split(local_engine, "local_engine")
    if port is None or port < 1:
        Endpoint.parse(f"{host}:0")
        return None
    return Endpoint.parse(f"{host}:{port}")


def peer_endpoint(remote_engine: str) -> Endpoint:
    """Where a remote engine of this name listens."""
    host, port = _split(remote_engine, "remote_engine")
    if port is None or port < 1:
        raise invalid(f"remote_engine={shown(remote_engine)} has no port: it listens nowhere")
    return Endpoint.parse(f"{host}:{port}")


def cluster_id_of(endpoint: Endpoint) -> int:
    """The id of the engine that listens there: whoever knows its name knows that."""
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
    """Staging memory of the original, which stages what is small; what is needed is made here."""
    if text and not re.fullmatch(r"[0-9]{1,6}:[0-9]{1,6}", text):
        raise invalid(f'{key}={shown(text)} must be "number:size in MB", such as "4:8" or "0:0"')


def _number(resources: str, name: str, default: int) -> int:
    """A number of the global resource config, or its digits; the options have checked it."""
    return int((json.loads(resources) if resources else {}).get(name, default))
