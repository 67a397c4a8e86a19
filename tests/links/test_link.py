"""Linking and unlinking between processes, and all refusals."""

from __future__ import annotations

import asyncio
import gc
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplan import BlockLease, CacheIndex, CacheKey, LLMException, LLMStatusCode
from kvplan.control.endpoint import Endpoint
from kvplan.links import ClusterInfo, IpInfo, LinkResult, LinkResults, LinkState
from kvplan.links.peer_link import PeerLink
from tests.links.end import DEADLINE_S, End
from tests.links.peer import Peer
from tests.support.ports import free_port
from tests.support.refusals import refused

MakeEnd = Callable[..., End]


def test_both_ends_are_linked_and_then_unlinked(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    assert end.state(2) is LinkState.LINKED
    assert peer.state(1) == "LINKED"
    status = end.status(2)
    assert (status.transport, status.address) == ("local", peer.address)
    assert status.age_s >= 0
    assert end.links.live() == 1
    assert end.links.unlink([2], 5000).status is LLMStatusCode.LLM_SUCCESS
    assert (end.state(2), peer.state(1), end.links.live()) == (None, None, 0)


@pytest.mark.parametrize("text", [(), ("why",)])
def test_a_failure_is_raised_without_the_frames_of_its_link(text: tuple[str, ...]) -> None:
    status, spans = LLMStatusCode.LLM_LINK_BUSY, ((0, 2),)
    results = LinkResults([LinkResult(2, status, _raised(text, status, spans))])
    for _ in range(2):
        with pytest.raises(LLMException) as caught:
            results.raise_for_status()
        found = caught.value
        assert (found.args, found.status_code, found.unconfirmed) == (text, status, spans)
        names = [entry.name for entry in caught.traceback]
        assert "raise_for_status" in names
        assert "_raised" not in names


def test_an_engine_at_a_path_can_be_linked_to(
    make_end: MakeEnd, make_peer: Callable[..., Peer], tmp_path: Path
) -> None:
    peer = make_peer(2, listen=f"ipc://{tmp_path}/socket")
    end = make_end(1)
    end.link(ClusterInfo(2, peer.address))
    assert (end.state(2), peer.state(1)) == (LinkState.LINKED, "LINKED")
    assert end.status(2).address == peer.address == f"ipc://{tmp_path}/socket"


def test_either_end_can_unlink(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    peer.run("end.links.unlink([1], 5000).raise_for_status()")
    assert (end.state(2), peer.state(1)) == (None, None)
    end.link(peer.cluster)
    assert peer.state(1) == "LINKED"
    end.links.unlink([peer.cluster], 5000).raise_for_status()  # its address is ignored
    assert (end.state(2), peer.state(1)) == (None, None)


def test_a_second_link_is_refused(end: End, peer: Peer) -> None:
    end.link(peer.cluster)
    end.check_link_fails(
        peer.cluster, LLMStatusCode.LLM_ALREADY_LINK, "cluster 2 is linked already"
    )
    assert peer.state(1) == "LINKED"


def test_a_call_that_is_cancelled_before_its_links_begin_leaves_nothing(
    end: End, recwarn: pytest.WarningsRecorder
) -> None:
    """Python would warn of each coroutine that never ran."""
    there = ClusterInfo(2, IpInfo("127.0.0.1", 1))

    async def run() -> None:
        call = asyncio.create_task(end.links._linking([there], 5000))
        await asyncio.sleep(0)  # the call has begun, and its links begin next
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []
    assert end.links.status() == []


def test_a_call_that_is_cancelled_during_a_handshake_is_one_warning(end: End) -> None:
    """The call itself logs nothing, as it raises first."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = ClusterInfo(2, IpInfo("127.0.0.1", silent.getsockname()[1]))

        async def run() -> None:
            call = asyncio.create_task(end.links.link_async([there], 3_600_000))
            held, _ = await asyncio.to_thread(silent.accept)
            with held:
                call.cancel()
                await asyncio.wait((call,))
                assert call.cancelled()

        asyncio.run(run())
        line = end.wait_for(2, "UNLINKED")
    assert line.startswith("WARNING")
    assert "reason='cluster 2: cancelled'" in line


def test_unlinking_a_cluster_that_was_never_linked(end: End) -> None:
    for result in end.links.unlink([0, 7, (1 << 64) - 1], 1000):
        assert result.status is LLMStatusCode.LLM_NOT_YET_LINK
    assert end.links.unlink([ClusterInfo(7)], 1000, force=True).status == 0
    with refused(LLMStatusCode.LLM_NOT_YET_LINK, "cluster 7 is not linked"):
        end.links.get(7)


@pytest.mark.parametrize(
    ("cluster", "kind", "message"),
    [
        (-1, ValueError, r"clusters\[1\]=-1 is out of range"),
        (1 << 64, ValueError, r"clusters\[1\]=18446744073709551616 is out of range"),
        (True, TypeError, r"clusters\[1\]=True must be ClusterInfo"),
        ("7", TypeError, r"clusters\[1\]='7' must be ClusterInfo"),
    ],
)
def test_values_that_name_no_cluster_are_not_unlinked(
    end: End, cluster: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        end.links.unlink([(1 << 64) - 1, cluster], 1000)


def test_only_a_bool_forces_the_end_of_a_link(end: End) -> None:
    for force in (1, "no", None):
        with pytest.raises(TypeError, match=f"force={force!r}"):
            end.links.unlink([7], 1000, force=force)  # type: ignore[arg-type]


def test_each_cluster_of_a_call_has_its_result(make_end: MakeEnd, end: End) -> None:
    other = make_end(2)
    results = end.links.link([ClusterInfo(3, _refused_address()), other.cluster], 1000)
    assert [result.cluster_id for result in results] == [3, 2]
    assert [result.status for result in results] == [LLMStatusCode.LLM_LINK_FAILED, 0]
    assert results.status is LLMStatusCode.LLM_LINK_FAILED
    with pytest.raises(LLMException, match="Connection refused"):
        results.raise_for_status()


ASKS: dict[str, Callable[..., object]] = {
    "sync": PeerLink.sync,
    "claim": partial(PeerLink.claim, key=CacheKey(2, 1)),
    "cache": partial(PeerLink.cache, index=CacheIndex(2, 1)),
    "leased": lambda link, **limit: link.leased(
        BlockLease(2, link.instance, 1, 1, (1,), True, "", ()), **limit
    ),
    "address_index": partial(PeerLink.address_index, writable=False, ask=True),
    "tensors": partial(PeerLink.tensors, addresses=[4096], stride=64, paged=True),
}


def take_places(end: End, places: asyncio.Semaphore) -> None:
    """Make later requests wait for a place, for longer than a test that passes."""

    async def take() -> None:
        while not places.locked():
            await places.acquire()
        asyncio.get_running_loop().call_later(DEADLINE_S, places.release)

    end.links._control.run(take())


@pytest.mark.parametrize("ask", ["sync", "find", "claim"])
def test_a_request_behind_others_has_the_same_timeout(make_end: MakeEnd, ask: str) -> None:
    """The peer has the maximum number of unanswered requests, so the call must wait for a place."""
    end, other = make_end(1, sync_kv_cache_wait_time=100), make_end(2)
    end.link(other.cluster)
    link = end.links.get(2)
    take_places(end, link._slots)
    with refused(LLMStatusCode.LLM_TIMEOUT, "cluster 2 has not answered within 100 ms"):
        getattr(link, ask)(*([] if ask == "sync" else [CacheKey(2, 1)]))


@pytest.mark.parametrize("ask", ASKS)
def test_a_caller_may_limit_the_wait_for_an_answer(make_end: MakeEnd, ask: str) -> None:
    end, other = make_end(1), make_end(2)
    end.link(other.cluster)
    link = end.links.get(2)
    take_places(end, link._slots)
    with refused(LLMStatusCode.LLM_TIMEOUT, "cluster 2 has not answered within 60 ms"):
        ASKS[ask](link, wait_ms=60.0)


def test_a_caller_may_limit_the_wait_for_a_notification(make_end: MakeEnd) -> None:
    end, other = make_end(1), make_end(2)
    end.link(other.cluster)
    link = end.links.get(2)
    take_places(end, link.notifier._slots)
    with refused(LLMStatusCode.LLM_TIMEOUT, "cluster 2 has not answered within 60 ms; the notif"):
        link.notify(b"now", 60.0)
    with refused(LLMStatusCode.LLM_TIMEOUT, "cluster 2 has not answered within 70 ms; the notif"):
        asyncio.run(link.notify_async(b"now", 70.0))


def test_a_refused_port_names_the_peer_and_the_reason(end: End) -> None:
    address = _refused_address()
    end.check_link_fails(
        ClusterInfo(2, address),
        LLMStatusCode.LLM_LINK_FAILED,
        f"cluster 2 at {address}: connect: .*Connection refused",
    )
    with pytest.raises(LLMException, match=r"the last attempt failed: cluster 2 at .*refused"):
        end.links.get(2)


def test_the_error_of_an_attempt_is_forgotten_after_a_success(
    end: End, make_end: Callable[..., End]
) -> None:
    other = make_end(2)
    failed = ClusterInfo(2, _refused_address())
    end.check_link_fails(failed, LLMStatusCode.LLM_LINK_FAILED, "Connection refused")
    end.link(other.cluster)
    end.links.unlink([2], 5000).raise_for_status()
    with pytest.raises(LLMException, match="cluster 2 is not linked") as error:
        end.links.get(2)
    assert "the last attempt" not in str(error.value)


def test_a_host_name_that_does_not_exist(end: End) -> None:
    cluster = ClusterInfo(2, "no-such-host.invalid:26000")
    end.check_link_fails(
        cluster, LLMStatusCode.LLM_LINK_FAILED, "cluster 2 at no-such-host.*resolve: "
    )


class _ClosingPort:
    """A port that closes all connections without letting them in, and counts them."""

    def __init__(self) -> None:
        self.knocks = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._turn_away)
        self._thread.start()

    def _turn_away(self) -> None:
        while True:
            visitor, _ = self._socket.accept()
            with visitor:
                if visitor.recv(1) == b"!":
                    return
                self.knocks += 1  # before the client sees that it is closed

    def __enter__(self) -> _ClosingPort:
        return self

    def __exit__(self, *exc: object) -> None:
        with socket.create_connection(self._socket.getsockname()) as last:
            last.sendall(b"!")
            self._thread.join()
        self._socket.close()


@pytest.mark.parametrize("count", [1, 3])
def test_connecting_is_tried_as_often_as_the_options_say(make_end: MakeEnd, count: int) -> None:
    end = make_end(1, listen="", link_retry_count=count)
    with _ClosingPort() as door:
        why = f"cluster 2 at {door.address}: authenticate: the peer has disconnected"
        end.check_link_fails(ClusterInfo(2, door.address), LLMStatusCode.LLM_LINK_FAILED, why)
        assert door.knocks == count


def test_connecting_is_tried_until_the_time_is_over(make_end: MakeEnd) -> None:
    end = make_end(1, listen="", link_retry_count=100)
    begun = time.monotonic()
    (result,) = end.links.link([ClusterInfo(2, _refused_address())], 200)
    assert "Connection refused" in str(result.error)
    assert time.monotonic() - begun < DEADLINE_S / 4


def test_a_refused_link_is_not_tried_again(make_end: MakeEnd, end: End) -> None:
    other = make_end(2, listen="", link_retry_count=100)
    why = "hello: cluster 1 is here, not cluster 3"
    other.check_link_fails(ClusterInfo(3, end.address), LLMStatusCode.LLM_LINK_FAILED, why)
    other.wait_for(3, "UNLINKED")
    with pytest.raises(queue.Empty):
        other.log.next_line()


def test_a_peer_that_starts_late_is_found(make_end: MakeEnd, end: End) -> None:
    end.links.stop_listening()
    other = make_end(2, listen="", link_retry_count=100)
    with ThreadPoolExecutor(1) as thread:
        linking = thread.submit(other.link, end.cluster, timeout_ms=20_000)
        other.wait_for(1, "UNLINKED")  # the first attempt
        end.links.listen(Endpoint.parse(end.address))
        linking.result()
    assert end.state(2) is LinkState.LINKED


def test_a_silent_listener_is_a_timeout(end: End) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cluster = ClusterInfo(2, f"127.0.0.1:{silent.getsockname()[1]}")
        (result,) = end.links.link([cluster], 200)
    assert result.status is LLMStatusCode.LLM_LINK_FAILED
    (waited,) = re.findall(r"no answer within (\d+) ms", str(result.error))
    assert int(waited) <= 200  # the rest after connecting


def test_an_answer_of_another_cluster_is_refused(make_end: MakeEnd, end: End) -> None:
    other = make_end(2)
    end.check_link_fails(
        ClusterInfo(3, other.address),
        LLMStatusCode.LLM_LINK_FAILED,
        "cluster 3 at .*: hello: cluster 2 is here, not cluster 3",
    )
    assert (end.links.live(), other.links.live()) == (0, 0)


@pytest.mark.parametrize("remote", [("localhost", "localhost"), ("[::1]", "::1")])
def test_addresses_may_be_names_and_ipv6(make_end: MakeEnd, remote: tuple[str, str]) -> None:
    if remote[1] == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 on this machine")
    other = make_end(2, listen=f"{remote[0]}:0")
    port = int(other.address.rpartition(":")[2])
    make_end(1).link(ClusterInfo(2, IpInfo(remote[1], port)))
    assert other.state(1) is LinkState.LINKED


def test_the_number_of_links_is_limited(make_end: MakeEnd) -> None:
    one, ends = make_end(1, max_links=2), [make_end(number) for number in (2, 3, 4)]
    one.link(*(end.cluster for end in ends[:2]))
    code = LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
    one.check_link_fails(ends[2].cluster, code, "cluster 1 has 2 links; max_links=2")
    ends[2].check_link_fails(one.cluster, code, "cluster 1 at .*: hello: cluster 1 has 2 links")
    one.links.unlink([2], 5000).raise_for_status()
    ends[2].link(one.cluster)


def test_64_peers_are_linked(make_end: MakeEnd, end: End) -> None:
    others = [make_end(100 + i) for i in range(64)]
    end.link(*(other.cluster for other in others))
    assert end.links.live() == 64
    assert all(other.state(1) is LinkState.LINKED for other in others)
    end.links.unlink([other.cluster for other in others], 5000).raise_for_status()
    assert end.links.live() == 0


def test_an_engine_that_does_not_listen_cannot_be_linked_with(make_end: MakeEnd, end: End) -> None:
    end.links.stop_listening()
    make_end(2).check_link_fails(end.cluster, LLMStatusCode.LLM_LINK_FAILED, "Connection refused")
    other = make_end(3)
    end.link(other.cluster)
    assert other.state(1) is LinkState.LINKED


class TestBadArguments:
    """Calls that are refused before they reach any peer."""

    @pytest.mark.parametrize(
        ("remote", "message"),
        [
            ((), "remote of cluster 2 has 0 addresses; exactly one"),
            (None, "remote of cluster 2 has 0 addresses; exactly one"),
            (("127.0.0.1:1", "127.0.0.1:2"), "has 2 addresses"),
            ("127.0.0.1:0", "port 0 cannot be linked to"),
        ],
    )
    def test_wrong_addresses_are_refused(self, end: End, remote: Any, message: str) -> None:
        with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
            end.links.link([ClusterInfo(2, remote)], 1000)

    @pytest.mark.parametrize(
        ("remote", "message"),
        [
            ("127.0.0.1", "endpoint='127.0.0.1' must be"),
            ("", "endpoint='' must be"),
            ("127.0.0.1:66666", r"port '66666' is out of range \[0, 65535\]"),
            ("host:port", "port 'port' is out of range"),
            (("127.0.0.1", 26000), "endpoint='127.0.0.1' must be"),
        ],
    )
    def test_impossible_addresses_are_refused_at_once(self, remote: Any, message: str) -> None:
        with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
            ClusterInfo(2, remote)

    def test_numbers_of_numpy(self) -> None:
        info = ClusterInfo(np.int64(2), IpInfo("127.0.0.1", np.uint16(7)))
        assert repr(info) == repr(ClusterInfo(2, IpInfo("127.0.0.1", 7)))

    def test_this_cluster_itself_is_refused(self, end: End) -> None:
        with pytest.raises(LLMException, match="remote_cluster_id=1 is this engine's own"):
            end.links.link([end.cluster], 1000)

    @pytest.mark.parametrize("call", ["link", "unlink"])
    def test_no_clusters_and_no_time_are_refused(self, end: End, call: str) -> None:
        act = getattr(end.links, call)
        with pytest.raises(LLMException, match="clusters is empty"):
            act([], 1000)
        with pytest.raises(LLMException, match="timeout_ms=0 is out of range"):
            act([ClusterInfo(2, "127.0.0.1:1")], 0)
        with pytest.raises(ValueError, match="timeout_ms=2147483648 is out of range"):
            act([ClusterInfo(2, "127.0.0.1:1")], 2**31)
        with pytest.raises(LLMException, match=f"timeout_ms=-{2**31} is out of range"):
            act([ClusterInfo(2, "127.0.0.1:1")], -(2**31))
        with pytest.raises(TypeError, match="timeout_ms='1' must be int"):
            act([ClusterInfo(2, "127.0.0.1:1")], "1")
        with pytest.raises(TypeError, match=r"clusters\[0\]='2' must be"):
            act(["2"], 1000)
        with pytest.raises(TypeError, match=r"clusters=.* must be a list or tuple"):
            act(ClusterInfo(2, "127.0.0.1:1"), 1000)

    def test_cluster_info(self) -> None:
        with pytest.raises(ValueError, match="remote_cluster_id=-1 is out of range"):
            ClusterInfo(-1)
        for name in ("remote", "local"):
            with pytest.raises(TypeError, match=f"^{name}=5 must be"):
                ClusterInfo(1, **{name: 5})  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=rf"^{name}\[0\]=5 must be"):
                ClusterInfo(1, **{name: [5]})  # type: ignore[arg-type]
        assert ClusterInfo(1, local="anything").local == ("anything",)
        with pytest.raises(ValueError, match=r"port=65536 is out of range \[0, 65535\]"):
            IpInfo("::1", 65536)


def _raised(text: tuple[str, ...], status: LLMStatusCode, spans: Any) -> LLMException:
    with pytest.raises(LLMException) as caught:
        raise LLMException(*text, status_code=status, unconfirmed=spans)
    return caught.value


def _refused_address() -> str:
    return f"127.0.0.1:{free_port()}"


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
