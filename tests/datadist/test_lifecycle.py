"""The life of an engine, from its construction to any kind of end."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvplan import (
    AddressRanges,
    Cache,
    CacheDesc,
    CacheIndex,
    CacheKey,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Options,
    Rows,
    Transfer,
    Transfers,
)
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.machine import Machine
from tests.support.held import Held
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
DESC = CacheDesc(2, (4, 16), DataType.DT_INT8)
CACHE = Cache(DESC, 1)

CALLS: dict[str, Callable[[LlmDataDist], object]] = {
    "set_role": lambda value: value.set_role(LlmRole.MIX),
    "link_clusters": lambda engine: engine.link_clusters([ClusterInfo(9, "127.0.0.1:1")]),
    "unlink_clusters": lambda engine: engine.unlink_clusters([9]),
    "link": lambda value: value.link("name", {2: 0, 3: 1}),
    "unlink": lambda value: value.unlink(1),
    "query_register_mem_status": lambda value: value.query_register_mem_status(1),
    "register_cache": lambda value: value.register_cache(DESC, [bytearray(64), bytearray(64)]),
    "register_blocks_cache": lambda value: value.register_blocks_cache(
        DESC, [bytearray(64), bytearray(64)]
    ),
    "unregister_cache": lambda value: value.unregister_cache(1),
    "allocate_cache": lambda value: value.allocate_cache(DESC),
    "allocate_blocks_cache": lambda value: value.allocate_blocks_cache(DESC),
    "deallocate_cache": lambda value: value.deallocate_cache(CACHE),
    "remove_cache_key": lambda value: value.remove_cache_key(CacheKey(1, 1)),
    "arrays": lambda end: end.arrays(CACHE),
    "links": lambda value: value.links(),
    "caches": lambda value: value.caches(),
    "caches of a peer": lambda value: value.caches(1),
    "pull_cache": lambda engine: engine.pull_cache(CacheIndex(1, 1), CACHE),
    "plan": lambda value: value.plan(Transfer(Rows(CacheIndex(1, 1)), Rows(CACHE))),
    "submit": lambda engine: engine.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(CACHE))),
    "copy_blocks": lambda engine: engine.copy_blocks(CACHE, {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_accepted_only_between_initialize_and_finalize(name: str) -> None:
    datadist = LlmDataDist(2, LlmRole.MIX)
    with refused(LLMStatusCode.LLM_FAILED):
        CALLS[name](datadist)
    datadist.initialize()
    datadist.finalize()
    with refused(LLMStatusCode.LLM_ENGINE_FINALIZED):
        CALLS[name](datadist)


def test_initialize_and_finalize_may_be_repeated(machine: Machine) -> None:
    datadist = machine.engine(2, LlmRole.MIX)
    datadist.finalize()
    assert "not initialized" in repr(datadist)
    datadist.initialize()
    cache = datadist.allocate_cache(DESC)
    datadist.initialize()
    assert [item.cache_id for item in datadist.caches()] == [cache.cache_id]
    datadist.finalize()
    datadist.finalize()
    assert "not initialized" in repr(datadist)


def test_a_second_initialize_with_other_options_is_refused() -> None:
    options = {"ListenIpInfo": "127.0.0.1:0", "kvplan.verify": "all"}
    with LlmDataDist(2, LlmRole.MIX) as datadist:
        datadist.initialize(options)
        address = datadist.listen_address
        for same in (options, Options.of(options), None):
            datadist.initialize(same)
        text = "other options: listen_ip_info='', not '127.0.0.1:0', verify='off', not 'all'; fin"
        with refused("LLM_PARAM_INVALID", text):
            datadist.initialize({})
        with refused("LLM_PARAM_INVALID", "heartbeat_interval_ms=10, not 1000"):
            datadist.initialize({**options, "kvplan.heartbeat_interval_ms": "10"})
        assert datadist.listen_address == address


def test_an_engine_that_is_initialized_again_has_no_old_state(make_engine: MakeEngine) -> None:
    owner, user = make_engine(1, listen=True), make_engine(2)
    for _ in range(2):
        assert owner.listen_address is not None
        user.link_clusters([ClusterInfo(1, owner.listen_address)]).raise_for_status()
        source, target = owner.allocate_cache(DESC), user.allocate_cache(DESC)
        assert (source.cache_id, target.cache_id) == (1, 1)
        owner.arrays(source)[0][:] = 7
        user.pull_cache(CacheIndex(1, 1), target)
        assert (user.arrays(target)[0][0] == 7).all()
        for engine in (owner, user):
            engine.finalize()
            assert engine.listen_address is None
        owner.initialize({"ListenIpInfo": "127.0.0.1:0"})
        user.initialize()


def test_leaving_the_with_block_finalizes() -> None:
    with LlmDataDist(2, LlmRole.MIX) as datadist:
        datadist.initialize()
        assert "not initialized" not in repr(datadist)
    assert "not initialized" in repr(datadist)


def test_a_finalized_engine_leaves_nothing_behind(machine: Machine) -> None:
    def live() -> None:
        first, second = (machine.engine(number, LlmRole.MIX) for number in (1, 2))
        with first as owner, second as user:
            owner.initialize({"ListenIpInfo": "127.0.0.1:0"})
            user.initialize()
            assert owner.listen_address is not None
            user.link_clusters([ClusterInfo(1, owner.listen_address)]).raise_for_status()
            owner.allocate_cache(DESC)
            user.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(user.allocate_cache(DESC)))).wait()
        for thread in threading.enumerate():
            if "-worker" in thread.name:  # is ending, but is not joined
                thread.join()

    live()  # objects that stay for the process: its copying threads
    before = Held.now()
    live()
    before.check_nothing_new()


def test_a_failed_initialize_leaves_nothing_behind() -> None:
    LlmDataDist(2, LlmRole.MIX).initialize()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        datadist = LlmDataDist(2, LlmRole.MIX)
        before = Held.now()
        with pytest.raises(LLMException, match=f"127.0.0.1:{port}"):
            datadist.initialize({"ListenIpInfo": f"127.0.0.1:{port}"})
        before.check_nothing_new()
    assert "not initialized" in repr(datadist)
    datadist.initialize({"ListenIpInfo": f"127.0.0.1:{port}"})
    assert datadist.listen_address == f"127.0.0.1:{port}"
    datadist.finalize()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"SyncKvCacheWaitTime": "0"}, LLMException),
        ({"ListenIpInfo": "nowhere"}, LLMException),
        (Options(transport="zzz"), LLMException),
        ([], TypeError),
    ],
)
def test_invalid_options_are_refused(options: object, error: type[Exception]) -> None:
    datadist = LlmDataDist(2, LlmRole.MIX)
    with pytest.raises(error):
        datadist.initialize(options)  # type: ignore[arg-type]
    assert "not initialized" in repr(datadist)


@pytest.mark.parametrize("cluster_id", [-1, 2**64])
def test_a_cluster_id_is_a_uint64(cluster_id: int) -> None:
    with pytest.raises(ValueError, match="cluster_id"):
        LlmDataDist(cluster_id, LlmRole.MIX)


def test_a_role_is_an_llm_role() -> None:
    with pytest.raises(TypeError, match="role"):
        LlmDataDist(1, 1)  # type: ignore[arg-type]


def test_a_call_before_initialize_names_it() -> None:
    with pytest.raises(LLMException, match=r"cluster 2 is not initialized; call initialize\(\)"):
        LlmDataDist(2, LlmRole.MIX).caches()


@pytest.mark.parametrize("role", [1, LlmRole.DECODER])
def test_a_role_in_the_place_of_the_cluster_id_names_the_order(role: int) -> None:
    with pytest.raises(TypeError, match=r"the order is LlmDataDist\(cluster_id, role\)"):
        LlmDataDist(LlmRole.PROMPT, role)  # type: ignore[arg-type]


def test_an_engine_has_no_device_before_initialize_and_no_duplicate_methods() -> None:
    assert LlmDataDist(2, LlmRole.MIX).device is None
    names = [
        name for item in LlmDataDist.__mro__[:-1] for name in vars(item) if not name.startswith("_")
    ]
    assert sorted(names) == sorted(set(names))


def join_released() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvplan-release":
            thread.join(10)


@pytest.mark.parametrize("way", ["pull", "push", "pull of ranges", "push of ranges"])
def test_closed_transfers_move_no_byte(make_engine: MakeEngine, way: str) -> None:
    """A request that the calling thread copies inline moves no byte, either."""
    with Transfers(1) as transfers:
        owner, user = make_engine(1, listen=True), make_engine(2, transfers=transfers)
        link(user, owner)
        theirs, ours = owner.allocate_cache(DESC), user.allocate_cache(DESC)
        there, here = owner.arrays(theirs), user.arrays(ours)
        rows = Rows(CacheIndex(1, theirs.cache_id)), Rows(ours)
        transfer: Transfer | AddressRanges = Transfer(*rows if "pull" in way else rows[::-1])
        if "ranges" in way:
            columns = ours.tensor_addrs, theirs.tensor_addrs, [DESC.stride] * 2
            transfer = AddressRanges(1, *columns, "pull" if "pull" in way else "push")
        read, written = (there, here) if "pull" in way else (here, there)
        for value in (1, 2, 3):
            for tensor in read:
                tensor[:] = value
            user.run(transfer)
            assert {int(tensor[0, 0]) for tensor in written} == {value}
        for tensor in read:
            tensor[:] = 9
        transfers.close()
        with refused(LLMStatusCode.LLM_ENGINE_FINALIZED, "closed"):
            user.run(transfer)
        assert {int(tensor[0, 0]) for tensor in written} == {3}


def test_an_engine_that_is_dropped_is_released(machine: Machine) -> None:
    datadist = machine.engine(2, LlmRole.MIX)
    datadist.initialize({"ListenIpInfo": "127.0.0.1:0"})
    datadist.allocate_cache(DESC)
    assert datadist.listen_address is not None
    host, _, port = datadist.listen_address.rpartition(":")
    socket.create_connection((host, int(port))).close()
    datadist.on_plan(partial(print, datadist))  # a cycle, which only the collector frees
    del datadist
    gc.collect()
    join_released()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_a_forked_child_is_refused_and_does_not_affect_its_parent(
    pair: tuple[LlmDataDist, LlmDataDist],
) -> None:
    owner, user = pair
    owner.allocate_cache(DESC)
    target = user.allocate_cache(DESC)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        outcomes = []
        try:
            for call in (*CALLS.values(), LlmDataDist.initialize):
                try:
                    call(user)
                    outcomes.append("taken")
                except LLMException as error:
                    outcomes.append(error.status_code.name)
            user.finalize()
            own = LlmDataDist(2, LlmRole.MIX)
            own.initialize()
            own.copy_cache(own.allocate_cache(DESC), own.allocate_cache(DESC), 0, 1)
            own.finalize()
            del user, owner, pair
            gc.collect()
        except BaseException as error:
            outcomes.append(repr(error))
        finally:
            os.write(write, " ".join(sorted(set(outcomes))).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        assert answer.read() == b"LLM_FAILED"
    os.waitpid(child, 0)
    user.pull_cache(CacheIndex(1, 1), target)


EXITS = {
    "nothing in flight": "",
    "a task in flight": "task = user.submit(Transfer(Rows(CacheIndex(1, 1)), Rows(target)))",
    "an exception": "raise SystemExit(0)",
}


@pytest.mark.parametrize("last", EXITS.values(), ids=EXITS)
def test_a_process_ends_quietly_without_finalize(machine: Machine, last: str) -> None:
    code = f"""
from kvplan import *
from tests.datadist.machine import machine_of
owner, user = (machine_of({machine.name!r}, i).engine(i, LlmRole.MIX) for i in (1, 2))
owner.initialize({{"ListenIpInfo": "127.0.0.1:0"}})
user.initialize()
user.link_clusters([ClusterInfo(1, owner.listen_address)]).raise_for_status()
desc = CacheDesc(64, (4, 65536), DataType.DT_INT8)
owner.allocate_cache(desc)
target = user.allocate_cache(desc)
user.pull_cache(CacheIndex(1, 1), target)
{last}
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, timeout=30
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")
