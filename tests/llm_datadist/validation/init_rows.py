"""LLMDataDist.init: accepted options, and the resulting mode of the engine."""

from __future__ import annotations

import json

from kvplan.llm_datadist import LLMConfig
from tests.llm_datadist.validation.environments import CACHE_MANAGER, REMOTE, Fresh
from tests.llm_datadist.validation.row import INVALID, TYPE, Accepted, Raised, Row

LOCAL_MODE = Accepted(["cache manager"])
REMOTE_MODE = Accepted(["cache manager", "remote"])


def config(**properties: object) -> dict[str, str]:
    """Return the options that an LLMConfig with these properties generates."""
    given = LLMConfig()
    for name, value in properties.items():
        setattr(given, name, value)
    options: dict[str, str] = given.generate_options()
    return options


def pool(**settings: int) -> dict[str, str]:
    return {"llm.MemPoolConfig": json.dumps(settings)}


def row(
    case: str,
    official: Accepted | Raised,
    options: object,
    ours: Accepted | Raised | None = None,
    why: str = "",
) -> Row:
    def call(fresh: Fresh) -> object:
        return fresh.init(options)  # type: ignore[arg-type]

    return Row(case, official, call, "fresh", ours, why)


def managed(case: str, official: Accepted | Raised, options: dict[str, str]) -> Row:
    return row(case, official, {**CACHE_MANAGER, **options})


ROWS = [
    row("init enable_cache_manager only", LOCAL_MODE, config(enable_cache_manager=True)),
    Row(
        "init nothing (v1 mode, no v1 pkg)",
        Raised(ModuleNotFoundError),
        lambda fresh: fresh.datadist.init({}),
        "fresh",
    ),
    row("init local_comm_res=''", REMOTE_MODE, config(local_comm_res="")),
    row(
        "init local_comm_res + cache_manager False",
        INVALID,
        config(local_comm_res="", enable_cache_manager=False),
    ),
    row(
        "init local_comm_res + remote False",
        LOCAL_MODE,
        config(local_comm_res="", enable_remote_cache_accessible=False),
    ),
    row(
        "init transfer_backend=bogus",
        INVALID,
        {**REMOTE, "llm.listenIpInfo": "127.0.0.1:0", "llm.TransferBackend": "bogus"},
    ),
    managed("init listen 'x'", INVALID, {"llm.listenIpInfo": "x"}),
    row(
        "init listen '127.0.0.1:abc'",
        Raised(ValueError),
        {**CACHE_MANAGER, "llm.listenIpInfo": "127.0.0.1:abc"},
        ours=INVALID,
        why="a refused value raises an LLMException of the interface (defect 8)",
    ),
    managed("init listen ipv6 '[::1]:26901'", INVALID, {"llm.listenIpInfo": "[::1]:26901"}),
    managed("init listen bad ip", INVALID, {"llm.listenIpInfo": "300.0.0.1:26901"}),
    managed("init mem_pool not json", INVALID, {"llm.MemPoolConfig": "notjson"}),
    managed("init mem_pool page_shift 9", INVALID, pool(memory_size=1 << 20, page_shift=9)),
    managed("init mem_pool page_shift 31", INVALID, pool(memory_size=1 << 20, page_shift=31)),
    managed("init mem_pool negative", INVALID, pool(memory_size=-1)),
    managed("init mem_pool missing key", INVALID, pool(page_shift=16)),
    managed("init raw llm.LinkRetryCount=101", INVALID, {"llm.LinkRetryCount": "101"}),
    managed("init raw SyncKvCacheWaitTime=0", LOCAL_MODE, {"llm.SyncKvCacheWaitTime": "0"}),
    managed("init raw SyncKvCacheWaitTime=abc", INVALID, {"llm.SyncKvCacheWaitTime": "abc"}),
    managed(
        "init raw EnableRemoteCacheAccessible=2",
        INVALID,
        {"llm.EnableRemoteCacheAccessible": "2"},
    ),
    managed("init raw deviceId='0;1'", INVALID, {"ge.exec.deviceId": "0;1"}),
    managed("init unknown option", LOCAL_MODE, {"llm.NoSuchOption": "1"}),
    row("init non-str value", TYPE, {**CACHE_MANAGER, "llm.LinkRetryCount": 1}),
    row("init(None)", Raised(AttributeError), None),
]
