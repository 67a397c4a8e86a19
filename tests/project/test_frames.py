"""A failed call keeps no object of its caller's local variables alive.

A cycle forms if a variable of a frame refers to an error whose traceback has that frame. The frames
of all callers, with their arrays, then stay until the garbage collector runs.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
import pytest

from kvnative._backend import Backend
from kvplan import (
    Cache,
    CacheDesc,
    ClusterInfo,
    DataType,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Plan,
    Rows,
    Transfer,
    Transfers,
    plan,
)
from kvplan.device import ascend, cuda
from kvplan.execution import HostMemory
from kvplan.execution.gather_task import GatherTask
from kvplan.hixl import Hixl
from kvplan.mooncake.engine import P2P, TransferEngine
from kvplan.nixl import nixl_agent
from kvplan.nixl._bindings import nixlBackendError, nixlRemoteDisconnectError
from tests.support.wrappers import fail_at, swap_at

UNUSED_ADDRESS = "127.0.0.1:1"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    for variable in (ascend.OVERRIDE, cuda.OVERRIDE):
        monkeypatch.setenv(variable, "/no/where")
    with ExitStack() as held:
        held.callback(gc.enable)
        gc.disable()
        held.callback(logging.disable, logging.NOTSET)
        logging.disable()  # pytest keeps each log record, and so the errors in it
        yield held


def started(held: ExitStack) -> LlmDataDist:
    engine = LlmDataDist(1, LlmRole.MIX)
    held.callback(engine.finalize)
    engine.initialize({"kvplan.transport": "local"})
    return engine


def start_without_an_accelerator(held: ExitStack) -> Callable[[], object]:
    return lambda: started(held)


def link_to_an_unused_address(held: ExitStack) -> Callable[[], object]:
    engine = started(held)
    return lambda: engine.link_clusters([ClusterInfo(7, UNUSED_ADDRESS)], 1000).raise_for_status()


def connect_to_an_unused_address_by_hixl(held: ExitStack) -> Callable[[], object]:
    engine = Hixl()
    held.callback(engine.finalize)
    assert engine.initialize("127.0.0.1") == 0
    return lambda: engine.connect(UNUSED_ADDRESS)


def connect_to_an_unused_address_by_mooncake(held: ExitStack) -> Callable[[], object]:
    engine = TransferEngine()
    held.callback(engine.close)
    assert engine.initialize("127.0.0.1", P2P, "tcp", "") == 0
    return lambda: engine.send_probe(UNUSED_ADDRESS)


def post_by_nixl(
    held: ExitStack, end: Callable[[nixl_agent, object], object]
) -> Callable[[], object]:
    """Return a post that fails; its handle stays alive, and knows the error."""
    agent, peer = nixl_agent("here"), nixl_agent("there")
    for each in (agent, peer):
        held.callback(each.agent.close)
    memory = np.zeros(128, np.uint8)
    held.callback(memory.fill, 0)
    ours, theirs = (
        each.register_memory([(memory.ctypes.data + 64 * i, 64, 0, "")], "DRAM")
        for i, each in enumerate((agent, peer))
    )
    agent.add_remote_agent(peer.get_agent_metadata())
    handle = agent.initialize_xfer("READ", ours.trim(), theirs.trim(), "there")
    held.callback(handle.release)
    assert agent.transfer(handle) in ("DONE", "PROC")
    while agent.check_xfer_state(handle) == "PROC":
        pass
    end(peer, theirs)
    return lambda: agent.transfer(handle)


def post_unregistered_memory(held: ExitStack) -> Callable[[], object]:
    return post_by_nixl(held, lambda peer, theirs: peer.deregister_memory(theirs))


def post_to_a_closed_agent(held: ExitStack) -> Callable[[], object]:
    return post_by_nixl(held, lambda peer, _: peer.agent.close())


class Array:
    """An object in a local variable of the calling program."""


@pytest.mark.parametrize(
    "prepare",
    [
        start_without_an_accelerator,
        link_to_an_unused_address,
        connect_to_an_unused_address_by_hixl,
        connect_to_an_unused_address_by_mooncake,
        post_unregistered_memory,
        post_to_a_closed_agent,
    ],
)
def test_a_failed_call_keeps_no_object_of_its_caller(
    held: ExitStack, prepare: Callable[[ExitStack], Callable[[], object]]
) -> None:
    call = prepare(held)

    def program() -> weakref.ref[Array]:
        array = Array()
        with suppress(LLMException, nixlBackendError, nixlRemoteDisconnectError):
            call()
        return weakref.ref(array)

    assert program()() is None


class Lost(HostMemory):
    """Memory that its owner takes back during a transfer."""

    is_lost = False

    def check(self, tensors: range | None = None) -> None:
        if self.is_lost:
            raise LLMException("taken back", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        self.is_lost = True


def plain(held: ExitStack, wrap: Callable[[Backend], Backend] | None = None) -> Transfers:
    transfers = Transfers(1, wrap)
    held.callback(transfers.close)
    return transfers


def sides(of: type[HostMemory] = HostMemory) -> tuple[Plan, HostMemory, HostMemory]:
    desc = CacheDesc(1, (2, 4), DataType.DT_INT8)
    src, dst = (of.from_arrays([np.zeros((2, 4), np.int8)]) for of in (HostMemory, of))
    return plan(Transfer(Rows(desc, slot=0), Rows(desc, slot=1))), src, dst


def execute_over_lost_memory(held: ExitStack) -> Callable[[], object]:
    transfers = plain(held)
    return lambda: transfers.execute(*sides(Lost))


def wait_for_lost_memory(held: ExitStack) -> Callable[[], object]:
    transfers = plain(held)

    def call() -> None:
        task = transfers.submit(*sides(Lost))
        task.wait()

    return call


def wait_for_a_failed_copy(held: ExitStack) -> Callable[[], object]:
    transfers = plain(held, partial(fail_at, descriptor=0))

    def call() -> None:
        task = transfers.submit(*sides())
        with suppress(LLMException):
            task.wait()
        task.wait()

    return call


def started_with(
    held: ExitStack, wrap: Callable[[Backend], Backend]
) -> tuple[LlmDataDist, Cache, Cache]:
    engine = held.enter_context(LlmDataDist(1, LlmRole.MIX, transfers=plain(held, wrap)))
    engine.initialize({"kvplan.transport": "local"})
    desc = CacheDesc(1, (8, 64), DataType.DT_INT8)
    cache, other = engine.allocate_blocks_cache(desc), engine.allocate_blocks_cache(desc)
    for at, each in enumerate(engine.arrays(cache)):
        each[:] = np.arange(8)[:, None] + at
    return engine, cache, other


def wait_for_a_failed_gather(held: ExitStack) -> Callable[[], object]:
    transfers = plain(held, partial(fail_at, descriptor=0))

    def call() -> None:
        task = GatherTask("gather")
        for index in range(2):
            task.begin(index, "a source", lambda: transfers.submit(*sides()))
        task.wait()

    return call


def wait_for_wrong_bytes(held: ExitStack) -> Callable[[], object]:
    engine, cache, other = started_with(held, partial(swap_at, descriptor=0))
    rows = Transfer(Rows(cache, [1, 3]), Rows(other, [5, 0]))

    def call() -> None:
        task = engine.submit(rows, verify=True)
        task.wait()

    return call


def wait_for_wrong_bytes_after_another_error(held: ExitStack) -> Callable[[], object]:
    call = wait_for_wrong_bytes(held)

    def after() -> None:
        try:
            held.enter_context(None)
        except TypeError:
            call()

    return after


@pytest.mark.parametrize(
    "prepare",
    [
        execute_over_lost_memory,
        wait_for_lost_memory,
        wait_for_a_failed_copy,
        wait_for_a_failed_gather,
        wait_for_wrong_bytes,
        wait_for_wrong_bytes_after_another_error,
    ],
)
def test_nothing_of_the_caller_of_a_failed_transfer_is_kept(
    held: ExitStack, prepare: Callable[[ExitStack], Callable[[], object]]
) -> None:
    call = prepare(held)

    def program() -> weakref.ref[Array]:
        array = Array()
        with suppress(LLMException):
            call()
            pytest.fail("the transfer has not failed")
        return weakref.ref(array)

    assert program()() is None
