"""Conversion of a program's options to those of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address

from kvplan.engine.option_rows import OPTION_GLOBAL_RESOURCE_CONFIG, SPELLINGS, WITHOUT_MEANING
from kvplan.engine.option_sources import configured
from kvplan.engine.options import Options, unknown_key
from kvplan.llm_datadist.configs import trans_str_ip
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import check_isinstance
from kvplan.llm_datadist.v2 import llm_utils
from kvplan.llm_datadist.v2.llm_utils import parse_listen_ip_info
from kvplan.status import LLMException, invalid
from kvplan.validation import shown


class EngineConfig:
    """Parsers of options with several parts."""

    @staticmethod
    def parse_listen_ip_info(listen_ip_info: str) -> tuple[int, int]:
        """Parse "ip:port"; return the address as a little-endian integer, and the port."""
        ip, port = llm_utils.parse_listen_ip_info(listen_ip_info)
        return trans_str_ip(ip), port


CACHE_MANAGER = "llm.EnableCacheManager"
HOST_POOL = "llm.HostMemPoolConfig"
LISTEN = "llm.listenIpInfo"
LOCAL_COMM_RES = "llm.LocalCommRes"
POOL = "llm.MemPoolConfig"
REMOTE_ACCESS = "llm.EnableRemoteCacheAccessible"
BACKEND = "llm.TransferBackend"
_FLOW_GRAPH = "ge.flowGraphMemMaxSize"
_OF_RDMA = ("llm.RdmaTrafficClass", "llm.RdmaServiceLevel")  # the range depends on the adapter
_RESOURCES = (OPTION_GLOBAL_RESOURCE_CONFIG, "GlobalResourceConfig")
_WAIT_TIME = "llm.SyncKvCacheWaitTime"


def completed(options: dict[str, str], role: str) -> dict[str, str]:
    """Return a copy with implied options, the role and the listening address."""
    if (size := options.get(_FLOW_GRAPH)) is not None:
        check_isinstance(_FLOW_GRAPH, size, str)
        if not size.isdecimal():
            raise invalid(f"{_FLOW_GRAPH}={shown(size)} must be one number: there is only one pool")
    own = {**options, "llm.Role": role}
    if LOCAL_COMM_RES in options:
        own.setdefault(CACHE_MANAGER, "1")
        own.setdefault(REMOTE_ACCESS, "1")
        _check_together(LOCAL_COMM_RES, own, CACHE_MANAGER)
    if BACKEND in options:
        own.setdefault(REMOTE_ACCESS, "1")
        _check_together(BACKEND, own, CACHE_MANAGER)
        _check_together(BACKEND, own, REMOTE_ACCESS)
        if LISTEN not in options:
            raise invalid(f"{BACKEND} needs {LISTEN}")
    if own.get(CACHE_MANAGER) == "1" and LISTEN in options:
        ip, port = check_listen(options[LISTEN])
        own |= {"llm.ListenIp": ip, "llm.ListenPort": str(port)}
    return own


def _check_together(option: str, options: dict[str, str], needed: str) -> None:
    if options.get(needed) != "1":
        raise invalid(f'{needed}={shown(options.get(needed))} must be "1" with {option}')


def check_listen(listen_ip_info: str) -> tuple[str, int]:
    """Read a listening address "ip:port"; the ip must be an IPv4 address."""
    try:
        ip, port = parse_listen_ip_info(listen_ip_info)
        IPv4Address(ip)
    except ValueError as error:
        raise invalid(f"{LISTEN}={shown(listen_ip_info)}: {error}") from None
    return ip, port


def engine_options(options: dict[str, str]) -> Options:
    """Return the options of the engine.

    Unknown options, RDMA numbers out of range, and the global resource config without the backend
    "hixl" are logged and ignored; a misspelled llm.listenIpInfo raises LLM_PARAM_INVALID. A
    SyncKvCacheWaitTime of "0" means the default.
    """
    known: dict[str, str] = {}
    if "unlike_caches" not in configured():
        known["kvplan.unlike_caches"] = "warn"  # the original copies between unlike caches
    for key, text in options.items():
        check_isinstance("options key", key, str, allow_none=False)
        check_isinstance(f"options[{key!r}]", text, str, allow_none=False)
        if key == _WAIT_TIME and text.isdecimal() and int(text) == 0:
            log.warn(f"{key}={text}: the default of {Options().sync_kv_cache_wait_time} ms is used")
        elif not is_known(key):
            log.warn(unknown_key(key))
        elif key in _RESOURCES and options.get(BACKEND) != "hixl":
            log.warn(f'{key} is ignored: it has an effect only with {BACKEND}="hixl"')
        elif key in _OF_RDMA and not _is_possible(key, text):
            log.warn(f"{key}={text} is ignored: it is out of range for any adapter")
        else:
            known[key] = text
    return Options.of(known)


def wait_time_ms(options: Mapping[str, str]) -> int:
    """Return the timeout of transfers between clusters, in milliseconds."""
    return int(options.get(_WAIT_TIME, "0")) or Options().sync_kv_cache_wait_time


def _is_possible(key: str, text: str) -> bool:
    try:
        Options.of({key: text})
    except (ValueError, LLMException):
        return not text.isdecimal()  # the engine refuses a text that is not a number
    return True


def is_known(key: str) -> bool:
    """Return True if kvplan or the original has an option with this key."""
    name = f"llm.{key.removeprefix('llm.')}"
    return key in SPELLINGS or name in WITHOUT_MEANING or key.startswith("ge.")
