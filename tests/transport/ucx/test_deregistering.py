"""Memory is deregistered by several threads while a peer does not take what it asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import numpy as np
import pytest

from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.ucx.transport import UcxTransport
from tests.transport.ucx.lanes_peer import TIMEOUT_MS, LanesPeer

pytestmark = pytest.mark.usefixtures("ucx")

SMALL = {"UCX_TCP_SNDBUF": "16k", "UCX_TCP_RCVBUF": "16k"}
"""Sockets that hold less than one message of those that are under way at a time."""
NBYTES = 64 << 20


class Reader(LanesPeer):
    """Pulls from this process."""

    def pull_and_stop(self, address: int, nbytes: int, metadata: bytes) -> None:
        """Let it pull all of that, and stop itself as soon as something has come."""
        self.send(
            f"""
            import os, signal
            from kvnative._executor import Executor, ThreadPool
            from kvnative._lower import Descriptors
            from kvplan.execution.memory import HostMemory
            into = np.zeros({nbytes}, np.uint8)
            remote = link.memory([{address}], {nbytes}, metadata={metadata!r})
            task = Executor(
                remote.backend(ThreadPool(1), "get", HostMemory.from_arrays([into]))
            ).submit(Descriptors.from_columns(
                *(np.array([it], np.uint64) for it in (into.ctypes.data, {address}, {nbytes}))))
            while not task.done and not into[::4096].any():
                pass
            os.kill(os.getpid(), signal.SIGSTOP)
            result = task.wait({TIMEOUT_MS}).status
            """
        )
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)


@pytest.fixture(params=[1, 3], ids=["one lane", "three lanes"])
def transport(request: pytest.FixtureRequest) -> Iterator[UcxTransport]:
    made = UcxTransport(
        mode="gathered", devices="lo", settings=json.dumps(SMALL), lanes=request.param
    )
    with made as transport:
        yield transport


@pytest.fixture
def reader(transport: UcxTransport, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    reader = Reader(transport.lanes)
    yield reader
    reader.close()


def test_all_who_deregister_it_wait_for_what_is_being_sent(
    transport: UcxTransport, reader: Reader
) -> None:
    """Whoever of them returns, nothing of it is in flight any more: its link is cut off by then."""
    link = reader.link(transport)
    memory = np.full(NBYTES, 7, np.uint8)
    registration = transport.register(memory)
    reader.pull_and_stop(memory.ctypes.data, NBYTES, transport.metadata([registration]))
    link.check()
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(transport.deregister, registration) for _ in range(3)]
        wait(calls, return_when=FIRST_COMPLETED)
        with pytest.raises(LLMException, match="did not take what it had asked for") as cut_off:
            link.check()
        assert [it.exception() for it in calls] == [None] * 3
    assert cut_off.value.status_code is LLMStatusCode.LLM_LINK_FAILED
