"""The life of an LLMDataDist: one engine per process, options, modes, roles."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from kvplan.llm_datadist import (
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    permit_several_engines,
)
from kvplan.llm_datadist.v2.llm_datadist import _shutdown_handler
from tests.llm_datadist.conftest import MakeDataDist, options
from tests.llm_datadist.peer import REMOTE
from tests.support.refusals import refused

MANAGED = {"llm.EnableCacheManager": "1"}
LOCAL = {"llm.LocalCommRes": ""}
LISTEN = "llm.listenIpInfo"
HIXL = {"llm.TransferBackend": "hixl"}
RESOURCES = (
    '{"comm_resource_config.listen_port": 26666, "comm_resource_config.max_active_channels": 128}'
)


@pytest.fixture
def uninitialized() -> Any:
    """An LLMDataDist that is not initialized; the fixture releases its resources in any case."""
    datadist = LLMDataDist(LLMRole.PROMPT, 7)
    yield datadist
    datadist.finalize()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("p", 1), TypeError),
        ((None, 1), TypeError),
        ((1, 1), TypeError),
        ((LLMRole.PROMPT, "1"), TypeError),
        ((LLMRole.PROMPT, -1), ValueError),
        ((LLMRole.PROMPT, 2**64), ValueError),
    ],
)
def test_invalid_arguments_of_the_constructor_are_refused(
    args: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        LLMDataDist(*args)


def test_the_cluster_id_is_known_before_init() -> None:
    assert LLMDataDist(LLMRole.MIX, 2**64 - 1).cluster_id == 2**64 - 1


@pytest.mark.parametrize(
    "call",
    [
        lambda value: value.cache_manager,
        lambda value: value.kv_cache_manager,
        lambda value: value.link("x", {7: 0, 8: 1}, ""),
        lambda value: value.unlink(1),
        lambda value: value.query_register_mem_status(1),
        lambda engine: engine.link_clusters([LLMClusterInfo()]),
        lambda engine: engine.unlink_clusters([LLMClusterInfo()]),
        lambda value: value.check_link_status(1),
        lambda value: value.switch_role(LLMRole.MIX),
    ],
)
def test_before_init_and_after_finalize_calls_are_refused(
    uninitialized: LLMDataDist, call: Any
) -> None:
    for given in (MANAGED, MANAGED | HIXL | {LISTEN: "127.0.0.1:0"}, MANAGED):
        with pytest.raises(RuntimeError, match="not initialized") as caught:
            call(uninitialized)
        assert type(caught.value) is RuntimeError
        uninitialized.init(dict(given))
        uninitialized.finalize()


def test_init_and_finalize_again_and_again(uninitialized: LLMDataDist) -> None:
    uninitialized.finalize()
    for _ in range(2):
        uninitialized.init(options())
        manager = uninitialized.cache_manager
        uninitialized.init({"llm.EnableCacheManager": "no matter: it is initialized"})
        assert uninitialized.cache_manager is manager
        assert LLMDataDist.llm_engine_instance is uninitialized
        uninitialized.finalize()
        uninitialized.finalize()
        assert LLMDataDist.llm_engine_instance is None


def test_options_of_a_finalized_engine_are_not_those_of_the_next(
    uninitialized: LLMDataDist,
) -> None:
    """A communicator is not available with llm.TransferBackend, and is unknown without."""
    for given, status in (
        (MANAGED | HIXL | {LISTEN: "127.0.0.1:0"}, LLMStatusCode.LLM_FEATURE_NOT_ENABLED),
        (MANAGED, LLMStatusCode.LLM_NOT_YET_LINK),
    ):
        uninitialized.init(dict(given))
        with refused(status):
            uninitialized.query_register_mem_status(1)
        uninitialized.finalize()


def test_a_manager_of_a_finalized_engine_refuses_calls(uninitialized: LLMDataDist) -> None:
    uninitialized.init(options())
    old = uninitialized.cache_manager
    uninitialized.finalize()
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED):
        old.unregister_cache(1)
    uninitialized.init(options())
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED):
        old.unregister_cache(1)
    uninitialized.cache_manager.unregister_cache(1)


def test_there_is_one_engine(datadist: LLMDataDist, uninitialized: LLMDataDist) -> None:
    with refused(LLMStatusCode.LLM_FAILED):
        uninitialized.init(options())
    assert LLMDataDist.llm_engine_instance is datadist
    datadist.finalize()
    uninitialized.init(options())
    with refused(LLMStatusCode.LLM_FAILED):
        datadist.init(options())


def test_several_engines_exist_if_permitted(
    datadist: LLMDataDist, uninitialized: LLMDataDist
) -> None:
    permit_several_engines()
    try:
        uninitialized.init(options())
        assert LLMDataDist.llm_engine_instance is uninitialized
        uninitialized.finalize()
        assert LLMDataDist.llm_engine_instance is datadist
    finally:
        permit_several_engines(False)
    with refused(LLMStatusCode.LLM_FAILED):
        uninitialized.init(options())


def test_a_remaining_engine_is_the_only_one(make_datadist: MakeDataDist) -> None:
    """Several engines were permitted before, and are not permitted any more."""
    permit_several_engines()
    try:
        remaining, latest = make_datadist(), make_datadist()
    finally:
        permit_several_engines(False)
    latest.finalize()
    assert LLMDataDist.llm_engine_instance is remaining
    with refused(LLMStatusCode.LLM_FAILED, "is initialized"):
        latest.init(options())


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_latest_of_the_remaining_engines_is_the_instance(
    make_datadist: MakeDataDist, first: int
) -> None:
    """The rule holds for each order in which three engines are finalized."""
    permit_several_engines()
    try:
        engines = [make_datadist() for _ in range(3)]
        engines.pop(first).finalize()
        assert LLMDataDist.llm_engine_instance is engines[1]
        engines.pop().finalize()
        assert LLMDataDist.llm_engine_instance is engines[0]
    finally:
        permit_several_engines(False)
    assert LLMDataDist.llm_engine_instance is engines[0]
    engines.pop().finalize()
    assert LLMDataDist.llm_engine_instance is None


def test_several_engines_by_environment(
    datadist: LLMDataDist, uninitialized: LLMDataDist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPLAN_SEVERAL_ENGINES", "1")
    uninitialized.init(options())
    assert datadist.cache_manager is not uninitialized.cache_manager


def test_the_instance_may_be_reset_from_outside(
    datadist: LLMDataDist, uninitialized: LLMDataDist
) -> None:
    LLMDataDist.llm_engine_instance = None
    uninitialized.init(options())
    assert LLMDataDist.llm_engine_instance is uninitialized
    _shutdown_handler()
    assert LLMDataDist.llm_engine_instance is None
    with pytest.raises(RuntimeError):
        datadist.cache_manager  # noqa: B018


def run(code: str) -> str:
    """Return the output of a new Python."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


INIT = """
from kvplan.llm_datadist import LLMDataDist, LLMRole
datadist = LLMDataDist(LLMRole.PROMPT, 1)
datadist.init({"llm.EnableCacheManager": "1"})
"""


def test_an_engine_is_finalized_when_the_process_ends() -> None:
    watched = (
        "finalize = LLMDataDist.finalize\n"
        "LLMDataDist.finalize = lambda it: (finalize(it), print('finalized'))\n"
    )
    assert run(INIT + watched) == "finalized\n"


def test_all_engines_are_finalized_at_the_end_although_one_fails(
    make_datadist: MakeDataDist, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVPLAN_SEVERAL_ENGINES", "1")
    engines = make_datadist(5), make_datadist(6)
    failing = engines[0]._running()
    finalize = failing.finalize

    def fail() -> None:
        finalize()
        raise LLMException("a peer is stopped")

    monkeypatch.setattr(failing, "finalize", fail)
    caplog.set_level("WARNING", "LLM_DATADIST")
    _shutdown_handler()
    for engine in engines:
        with pytest.raises(RuntimeError, match="not initialized"):
            engine.cache_manager  # noqa: B018
    assert LLMDataDist.llm_engine_instance is None
    assert "could not finalize cluster 5: a peer is stopped" in caplog.text


def test_a_forked_child_makes_an_engine_of_its_own() -> None:
    code = """
import os
if (pid := os.fork()) == 0:
    child = LLMDataDist(LLMRole.DECODER, 2)
    child.init({"llm.EnableCacheManager": "1"})
    child.finalize()
    datadist.finalize()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(datadist.cache_manager.unregister_cache(9))
"""
    assert run(INIT + code) == "0\nNone\n"


def test_options_belong_to_the_caller(uninitialized: LLMDataDist) -> None:
    given = options(**LOCAL)
    before = dict(given)
    uninitialized.init(given)
    assert given == before
    assert uninitialized._engine_options is not given
    del given["llm.LocalCommRes"]
    assert uninitialized._engine_options["llm.LocalCommRes"] == ""


@pytest.mark.parametrize(
    ("given", "implied"),
    [
        (MANAGED, {}),
        (LOCAL, {"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"}),
        (LOCAL | {"llm.EnableRemoteCacheAccessible": "0"}, {"llm.EnableCacheManager": "1"}),
        (
            MANAGED | HIXL | {LISTEN: "127.0.0.1:0"},
            {
                "llm.EnableRemoteCacheAccessible": "1",
                "llm.ListenIp": "127.0.0.1",
                "llm.ListenPort": "0",
            },
        ),
        (MANAGED | {"llm.SyncKvCacheWaitTime": "0"}, {}),
        (MANAGED | {"llm.RdmaTrafficClass": "101", "llm.RdmaServiceLevel": "100"}, {}),
        (MANAGED | {"llm.Unknown": "x", "ge.anything": "y", "no prefix": ""}, {}),
        (MANAGED | {"kvplan.heartbeat_interval_ms": "500"}, {}),
        # The option is read only with the backend "hixl".
        (MANAGED | {"llm.GlobalResourceConfig": "{bad"}, {}),
        (MANAGED | {"GlobalResourceConfig": '{"comm_resource_config.qos": 9}'}, {}),
        (
            MANAGED | HIXL | {LISTEN: "127.0.0.1:0", "llm.GlobalResourceConfig": RESOURCES},
            {
                "llm.EnableRemoteCacheAccessible": "1",
                "llm.ListenIp": "127.0.0.1",
                "llm.ListenPort": "0",
            },
        ),
        (MANAGED | {"ge.flowGraphMemMaxSize": "1000000"}, {}),
        (MANAGED | {"ge.exec.deviceId": "3", "ge.session_device_id": "3"}, {}),
    ],
)
def test_valid_options_are_accepted(
    uninitialized: LLMDataDist, given: dict[str, str], implied: dict[str, str]
) -> None:
    uninitialized.init(given)
    assert uninitialized._engine_options == {**given, **implied, "llm.Role": "Prompt"}


@pytest.mark.parametrize(
    "given",
    [
        LOCAL | {"llm.EnableCacheManager": "0"},
        HIXL | {"llm.EnableCacheManager": "0", LISTEN: "127.0.0.1:0"},
        MANAGED | HIXL,
        MANAGED | HIXL | {LISTEN: "127.0.0.1:0", "llm.EnableRemoteCacheAccessible": "0"},
        MANAGED | {"llm.TransferBackend": "bogus", LISTEN: "127.0.0.1:0"},
        MANAGED | HIXL | {LISTEN: "127.0.0.1:0", "llm.GlobalResourceConfig": "{bad"},
        MANAGED
        | HIXL
        | {LISTEN: "127.0.0.1:0", "llm.GlobalResourceConfig": '{"comm_resource_config.qos": 9}'},
        MANAGED | {LISTEN: "x"},
        MANAGED | {LISTEN: "127.0.0.1:abc"},
        MANAGED | {LISTEN: "127.0.0.1:65536"},
        MANAGED | {LISTEN: "[::1]:26901"},
        MANAGED | {LISTEN: "not.an.ip.at.all:26901"},
        MANAGED | {LISTEN: "300.0.0.1:26901"},
        MANAGED | {"llm.MemPoolConfig": "{"},
        MANAGED | {"llm.MemPoolConfig": '{"memory_size": 1024, "page_shift": 9}'},
        MANAGED | {"llm.MemPoolConfig": '{"memory_size": 1024, "page_shift": 31}'},
        MANAGED | {"llm.HostMemPoolConfig": '{"memory_size": -1}'},
        MANAGED | {"llm.MemPoolConfig": "{}"},
        MANAGED | {"llm.LinkRetryCount": "101"},
        MANAGED | {"llm.SyncKvCacheWaitTime": "abc"},
        MANAGED | {"llm.SyncKvCacheWaitTime": "²"},  # a digit of Unicode, but not a number
        MANAGED | {"ge.flowGraphMemMaxSize": "²"},
        MANAGED | {"llm.RdmaServiceLevel": "x"},
        MANAGED | {"llm.EnableRemoteCacheAccessible": "2"},
        MANAGED | {"ge.exec.deviceId": "0;1"},
        MANAGED | {"ge.flowGraphMemMaxSize": "1,2"},
        MANAGED | {"ge.flowGraphMemMaxSize": "many"},
    ],
)
def test_invalid_options_are_refused(uninitialized: LLMDataDist, given: dict[str, str]) -> None:
    with refused("LLM_PARAM_INVALID"):
        uninitialized.init(given)
    assert LLMDataDist.llm_engine_instance is None
    uninitialized.init(options())


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (MANAGED | {"llm.LinkRetryCount": 1}, TypeError),
        (MANAGED | {"llm.Unknown": 1}, TypeError),
        (MANAGED | {1: "x"}, TypeError),
        (MANAGED | {LISTEN: 26000}, TypeError),
        ({"ge.flowGraphMemMaxSize": 1}, TypeError),
        ([("llm.EnableCacheManager", "1")], TypeError),
        (None, AttributeError),
    ],
)
def test_options_of_another_type(
    uninitialized: LLMDataDist, given: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        uninitialized.init(given)
    assert LLMDataDist.llm_engine_instance is None


def test_an_occupied_port_is_refused(
    uninitialized: LLMDataDist, make_datadist: MakeDataDist
) -> None:
    permit_several_engines()
    try:
        other = make_datadist(**{LISTEN: "127.0.0.1:0"})
        assert other._llm_datadist is not None
        taken = str(other._llm_datadist.listen_address)
        with refused(LLMStatusCode.LLM_FAILED):
            uninitialized.init(options(**{LISTEN: taken}))
    finally:
        permit_several_engines(False)


def test_calls_of_version_1_are_refused_with_a_cache_manager(datadist: LLMDataDist) -> None:
    with refused("LLM_PARAM_INVALID"):
        _ = datadist.kv_cache_manager
    with refused("LLM_PARAM_INVALID"):
        datadist.check_link_status(1)


def test_without_a_cache_manager_version_1_is_missing(uninitialized: LLMDataDist) -> None:
    with pytest.raises(ModuleNotFoundError, match="llm_datadist"):
        uninitialized.init({})
    assert LLMDataDist.llm_engine_instance is None
    uninitialized.init(options())


def test_switch_role(make_datadist: MakeDataDist) -> None:
    datadist = make_datadist(**REMOTE)
    engine = datadist._llm_datadist
    assert engine is not None
    datadist.switch_role(LLMRole.DECODER)  # the role that it has already
    assert engine.listen_address is None
    datadist.switch_role(LLMRole.PROMPT, options(**{LISTEN: "127.0.0.1:0"}))
    assert engine.listen_address is not None
    assert engine._role.name == "PROMPT"
    datadist.switch_role(role=LLMRole.MIX, switch_options={})
    assert engine.listen_address is None
    with pytest.raises(TypeError):
        datadist.switch_role(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        datadist.switch_role(LLMRole.MIX, [])  # type: ignore[arg-type]
    for wrong in (1, None):
        with pytest.raises(TypeError):
            datadist.switch_role(LLMRole.MIX, {LISTEN: wrong})  # type: ignore[dict-item]
    with refused("LLM_PARAM_INVALID"):
        datadist.switch_role(LLMRole.MIX, {LISTEN: "x"})
    assert engine._role.name == "MIX"


@pytest.mark.parametrize("key", ["listen_ip_info", "llm.ListenIPInfo"])
def test_a_misspelled_option_of_the_address_is_refused(
    uninitialized: LLMDataDist, make_datadist: MakeDataDist, key: str
) -> None:
    wrong = {key: "127.0.0.1:0"}
    with pytest.raises(LLMException, match=f"option '{key}' is unknown.*to listen at"):
        uninitialized.init(MANAGED | wrong)
    datadist = make_datadist()
    with pytest.raises(LLMException, match=f"option '{key}' is unknown.*to listen at"):
        datadist.switch_role(LLMRole.MIX, wrong)


def test_the_option_of_the_cpp_interface_sets_the_address(make_datadist: MakeDataDist) -> None:
    datadist = make_datadist(**{"llm.ListenIpInfo": "127.0.0.1:0"})
    engine = datadist._llm_datadist
    assert engine is not None
    assert engine.listen_address is not None
    datadist.switch_role(LLMRole.DECODER)
    datadist.switch_role(LLMRole.PROMPT, {"llm.ListenIpInfo": "127.0.0.1:0"})
    assert engine.listen_address is not None


def test_errors_are_those_of_kvplan(uninitialized: LLMDataDist) -> None:
    with pytest.raises(LLMException, match="LocalCommRes"):
        uninitialized.init(LOCAL | {"llm.EnableCacheManager": "0"})
