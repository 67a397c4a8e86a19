"""The arguments of `Hixl.initialize`: the name of the engine, and its options."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvplan.addressed.names import cluster_id_of, own_endpoint
from kvplan.device.choice import current_device
from kvplan.engine.option_kinds import FLAG, Kind, described, one_of, option, rows_of
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
from kvplan.validation import shown

_log = Log("kvplan.hixl")

OPTION_MEM_DEVICE: Final = "kvplan.mem_device"

_THREADS: Final = 2
_CAPACITY: Final = 128

# Options of the original that the engine has under other names.
_SAME: Final = {
    OPTION_RDMA_TRAFFIC_CLASS: "llm.RdmaTrafficClass",
    OPTION_RDMA_SERVICE_LEVEL: "llm.RdmaServiceLevel",
    OPTION_LOCAL_COMM_RES: "llm.LocalCommRes",
    OPTION_RESOURCES: OPTION_GLOBAL_RESOURCE_CONFIG,
}


def _check_buffer_pool(name: str, text: str) -> None:
    if text and not re.fullmatch(r"[0-9]{1,6}:[0-9]{1,6}", text):
        raise invalid(f'{name}={shown(text)} must be "number:size in MB", such as "4:8" or "0:0"')


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class OwnOptions:
    """Options of `Hixl` that the engine does not have."""

    # fmt: off
    auto_connect: bool = option(
        False, FLAG,
        "Let a transfer connect with its peer.",
        OPTION_AUTO_CONNECT, f"adxl.{OPTION_AUTO_CONNECT}")
    mem_device: str = option(
        "refuse", one_of(("refuse", "host")),
        "Memory of MEM_DEVICE on a host without a device: `refuse` it, or treat it as `host` "
        "memory. Also the environment variable `KVPLAN_MEM_DEVICE`.",
        OPTION_MEM_DEVICE, see="../how-to/hixl.md#device-memory-where-there-is-no-device")
    buffer_pool: str = option(
        "", Kind(_check_buffer_pool, values="number:size in MB"),
        "Staging memory of the original. Checked; kvplan sizes its own.",
        OPTION_BUFFER_POOL, f"adxl.{OPTION_BUFFER_POOL}")
    enable_use_fabric_mem: bool = option(
        False, FLAG,
        "Fabric memory of the original. Checked; this host has none.",
        OPTION_ENABLE_USE_FABRIC_MEM, f"adxl.{OPTION_ENABLE_USE_FABRIC_MEM}")
    # fmt: on


_OWN: Final = {key: row for row in rows_of(OwnOptions) for key in row.keys}
_MEM_DEVICE: Final = _OWN[OPTION_MEM_DEVICE]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a `Hixl`."""

    name: str  # of the engine, as given
    cluster_id: int  # follows from the name if the engine listens
    engine: Options  # of kvplan's engine
    auto_connect: bool
    device_is_host: bool
    threads: int  # maximum number of threads for asynchronous connects
    capacity: int  # maximum number of waiting asynchronous connects


def read(local_engine: str, options: Mapping[str, str]) -> Settings:
    """Read the arguments of `Hixl.initialize`."""
    listen = own_endpoint(local_engine)
    texts: dict[str, str] = {}
    own: dict[str, Any] = {}
    mem_device = os.environ.get(_MEM_DEVICE.variable)
    if mem_device and OPTION_MEM_DEVICE not in options:
        _MEM_DEVICE.kind.check(_MEM_DEVICE.variable, mem_device)
        own["mem_device"] = mem_device
    for key, text in options.items():
        if row := _OWN.get(key):
            own[row.field] = value = row.kind.read(key, text)
            row.kind.check(key, value)
        elif (bare := key.removeprefix("adxl.")) in _SAME:
            texts[_SAME[bare]] = text
        elif key in SPELLINGS:
            texts[key] = text
        else:
            _log.warning("option %s=%s is unknown and ignored", shown(key), shown(text))
    given = OwnOptions(**own)
    if given.enable_use_fabric_mem:
        if given.buffer_pool not in ("", "0:0"):
            raise invalid(
                f'BufferPool={shown(given.buffer_pool)} must be "0:0" with EnableUseFabricMem=1'
            )
        _log.warning("option EnableUseFabricMem=1 is ignored: this host has no fabric memory")
    engine = Options.of(texts)
    if listen is not None:
        engine = replace(engine, listen_ip_info=str(listen))
    if "device_id" not in {SPELLINGS[key].field for key in texts} | configured().keys():
        # As in the original: the current device of the program.
        engine = replace(engine, device_id=current_device(engine.accelerator))
    resources = engine.global_resource_config
    return Settings(
        name=local_engine,
        cluster_id=secrets.randbits(64) if listen is None else cluster_id_of(listen),
        engine=engine,
        auto_connect=given.auto_connect,
        device_is_host=given.mem_device == "host",
        threads=_number(resources, "connect_pool.thread_num", _THREADS),
        capacity=_number(resources, "connect_pool.task_queue_capacity", _CAPACITY),
    )


def _number(resources: str, name: str, default: int) -> int:
    """Return a number of the global resource config, which `Options` has checked."""
    return int((json.loads(resources) if resources else {}).get(name, default))
