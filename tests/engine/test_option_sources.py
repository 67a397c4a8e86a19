"""Options of the environment and of files: precedence in every interface, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvplan import LlmDataDist, LlmRole, Options, PoolConfig
from kvplan.engine.option_sources import VARIABLES
from kvplan.hixl.options import read as hixl_settings
from kvplan.llm_datadist.v2.config import engine_options
from kvplan.vllm.options import ConnectorOptions
from tests.support.refusals import refused

INVALID = "LLM_PARAM_INVALID"
FILE = """
title = "what else a program keeps here"

[kvplan]
transport = "tcp"
"llm.SyncKvCacheWaitTime" = 70
kvplan.max_links = 7
ge.exec.deviceId = 3
encrypt = true
ucx_settings = { UCX_IB_GID_INDEX = "3" }
MemPoolConfig = { memory_size = 1048576 }
llm.MemoryUtilization = "0.9"

[other]
max_links = 8
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "options.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KVPLAN_OPTIONS_FILE", *VARIABLES):
        monkeypatch.delenv(variable, raising=False)


def initialized(options: dict[str, str]) -> Options:
    with LlmDataDist(1, LlmRole.MIX) as engine:
        engine.initialize(options)
        assert engine._engine is not None
        return engine._engine.options


SURFACES: dict[str, Callable[[dict[str, str]], Options]] = {
    "LlmDataDist": initialized,
    "LlmDataDist, typed": lambda given: initialized(Options.of(given)),  # type: ignore[arg-type]
    "llm_datadist": engine_options,
    "hixl": lambda given: hixl_settings("127.0.0.1", given).engine,
    "vllm": lambda given: Options.of(ConnectorOptions.of({"engine": given}).engine),
}


@pytest.mark.parametrize("surface", SURFACES)
def test_arguments_precede_the_environment_which_precedes_the_file(
    surface: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = SURFACES[surface]
    before = make({})
    assert (before.max_links, before.max_tensors, before.device_id) == (512, 240, 0)
    monkeypatch.setenv("KVPLAN_OPTIONS_FILE", str(file))
    monkeypatch.setenv("KVPLAN_TRANSPORT", "local")
    monkeypatch.setenv("KVPLAN_MAX_TENSORS", "")  # empty is the same as not set
    monkeypatch.setenv("KVPLAN_HEARTBEAT_INTERVAL_MS", "20")
    monkeypatch.setenv("KVPLAN_SYNC_KV_CACHE_WAIT_TIME", "80")
    monkeypatch.setenv("KVPLAN_UNLIKE_CACHES", "refuse")
    found = make({"kvplan.heartbeat_interval_ms": "30"})
    assert (found.heartbeat_interval_ms, found.heartbeat_timeout_ms) == (30, 5000)
    assert (found.transport, found.sync_kv_cache_wait_time) == ("local", 80)
    assert (found.max_links, found.max_tensors, found.device_id) == (7, 240, 3)
    assert (found.encrypt, found.unlike_caches) == (True, "refuse")
    assert found.mem_pool_config == PoolConfig(1048576)


@pytest.mark.parametrize("surface", SURFACES)
def test_one_node_or_all(surface: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, path = SURFACES[surface], tmp_path / "options.toml"
    monkeypatch.setenv("KVPLAN_OPTIONS_FILE", str(path))
    for text, expected in (('"all"', "all"), ('"0"', 0), ("0", 0)):
        path.write_text(f"[kvplan]\nnuma_node = {text}\n")
        assert make({}).numa_node == expected
    monkeypatch.setenv("KVPLAN_NUMA_NODE", "all")
    assert make({}).numa_node == "all"
    assert make({"kvplan.numa_node": "0"}).numa_node == 0
    with refused(INVALID, r"numa_node\)='some' must be \"all\" or a number in \[0, 1023\]"):
        make({"kvplan.numa_node": "some"})


def test_a_file_is_read_by_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLAN_MAX_LINKS", "9")
    found = Options.from_file(file, transport="local")
    assert (found.transport, found.max_links, found.sync_kv_cache_wait_time) == ("local", 9, 70)
    assert found.ucx_settings == '{"UCX_IB_GID_INDEX": "3"}'
    named = file.with_name("named.toml")
    named.write_text("[kvplan]\nmax_links = 5\ncomm_port = 5\n")
    monkeypatch.setenv("KVPLAN_OPTIONS_FILE", str(named))
    found = Options.from_file(file)
    assert (found.max_links, found.comm_port) == (9, 5)  # the program's file takes precedence


def test_set_role_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLAN_LISTEN_IP_INFO", "127.0.0.1:0")
    with LlmDataDist(1, LlmRole.MIX) as engine:
        engine.initialize()
        assert engine.listen_address is not None
        engine.set_role(LlmRole.DECODER, {"ListenIpInfo": ""})
        assert not engine.listen_address
        with refused(INVALID, "of set_role may hold only ListenIpInfo"):
            engine.set_role(LlmRole.DECODER, {"kvplan.max_links": "3"})


@pytest.mark.parametrize(
    ("variable", "text", "error"),
    [
        ("MAX_LINKS", "0", r"=0 is out of range \[1, 65536\]; max_links is from environment varia"),
        ("MAX_LINKS", "many", "KVPLAN_MAX_LINKS='many' must be one whole number"),
        ("ENCRYPT", "yes", 'KVPLAN_ENCRYPT=\'yes\' must be "0" or "1"'),
        ("PAGES", "big", "one of auto.*; pages is from environment variable KVPLAN_PAGES"),
        ("NUMA_NODE", "a", '"all" or a number .*; numa_node is from .*variable KVPLAN_NUMA_NODE'),
        ("MEM_POOL_CONFIG", '{"memory_size": -1}', "KVPLAN_MEM_POOL_CONFIG=.*memory_size"),
        ("HEARTBEAT_INTERVAL_MS", "6000", "must be more than heartbeat_interval_ms=6000; heartb"),
        ("OPTIONS_FILE", "/none.toml", "none.toml: the file of options cannot be read: .*No such"),
    ],
)
def test_invalid_variables(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, error: str
) -> None:
    monkeypatch.setenv(f"KVPLAN_{variable}", text)
    with refused(INVALID, error):
        Options()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("max_links = 1", r"has no table \[kvplan\]"),
        ("[kvplan", "is not TOML: Expected ']'"),
        ("[kvplan]\nmax_link = 1", "max_link is not an option; the nearest is 'max_links'"),
        ("[kvplan]\nmax_links = 1\nkvplan.max_links = 1", "max_links and .* are the same option"),
        ("[kvplan]\nmax_links = true", "max_links=True must be text, a whole number or a table"),
        ("[kvplan]\nencrypt = 2", "encrypt=2 must be true or false"),
        ("[kvplan]\nmax_links = 1.5", "max_links=1.5 must be text, a whole number, true, false"),
        ("[kvplan]\nnuma_node = 'x'", "'x' must be \"all\" or a num.*; numa_node is from .*toml"),
        ("[kvplan]\nmax_links = 0", r"=0 is out of range \[1, 65536\]; max_links is from .*toml"),
        ("[kvplan]\ntransport = 'x'\nverify = 'x'", "'x' must be .*; verify is from .*: verify"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "options.toml"
    path.write_text(text)
    with refused(INVALID, error) as caught:
        Options.from_file(path)
    assert str(path) in str(caught.value)


def test_every_option_has_a_variable_of_its_own() -> None:
    others: set[Any] = {"KVPLAN_RECORD", "KVPLAN_EXPLAIN", "KVPLAN_DEBUG", "KVPLAN_MEM_DEVICE"}
    fields = Options.__dataclass_fields__.keys()
    assert {row.field for row in VARIABLES.values()} == fields
    assert not VARIABLES.keys() & others


def test_an_error_without_a_message_that_a_value_raises_is_not_replaced() -> None:
    class Broken(int):
        def __lt__(self, other: object) -> bool:
            raise ValueError

        __le__ = __gt__ = __ge__ = __lt__

    with pytest.raises(ValueError, match=r"^$"):
        Options(device_id=Broken(1))
