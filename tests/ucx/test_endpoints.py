"""Endpoints between two processes of one host: connecting them, and their ends."""

from __future__ import annotations

import select
import threading
from pathlib import Path

import pytest

from kvnative._backend import KVN_CANCELLED, KVN_PEER_GONE
from kvnative._ucx import UcxEndpoint, UcxError, UcxWorker
from kvplan.transport.ucx.library import Found
from tests.support.held import Held
from tests.support.ucx_library import found
from tests.ucx.peer import TAG, TIMEOUT_MS, UcxPeer, open_worker, run, stand_in


def dead(endpoint: UcxEndpoint) -> tuple[int, str]:
    """Return the failure of an endpoint, which must come soon."""
    assert select.select([endpoint.death_fd], [], [], TIMEOUT_MS / 1000)[0]
    assert not endpoint.connected
    assert endpoint.failure is not None
    return endpoint.failure


def test_an_endpoint_connects_without_the_peer(worker: UcxWorker, mortal: UcxPeer) -> None:
    endpoint = mortal.endpoint(worker)
    assert (endpoint.connected, endpoint.transport) == (False, "")
    mortal.stop()
    endpoint.connect(TIMEOUT_MS)
    assert (endpoint.connected, endpoint.transport) == (True, "cma/memory")
    assert endpoint.failure is None
    endpoint.connect(TIMEOUT_MS)  # at once


@pytest.mark.parametrize("minor", [13, 14])
def test_an_endpoint_names_its_transport_with_each_version(
    ucx: Found, tmp_path: Path, minor: int
) -> None:
    """UCX has a query since 1.14; with earlier versions, its text about an endpoint is parsed."""
    library = stand_in(tmp_path, "lanes", ucx.path, f"-DMINOR={minor}")
    script = """
        from pathlib import Path
        from tests.ucx.peer import UcxPeer

        library, peer = UcxLibrary.load(path), UcxPeer(Path(sys.argv[2]))
        worker = UcxWorker(library)
        print(library.version[1], peer.connect(worker).transport)
        worker.close()
        peer.close()
        """
    assert run(script, library, str(tmp_path / "memory")) == f"{minor} cma/memory\n"


def test_a_peer_that_died_before_the_connection_is_an_error(
    worker: UcxWorker, mortal: UcxPeer
) -> None:
    mortal.kill()
    mortal.close()
    endpoint = mortal.endpoint(worker)
    with pytest.raises(UcxError) as caught:
        endpoint.connect(TIMEOUT_MS)
    assert caught.value.status == KVN_PEER_GONE
    assert dead(endpoint)[0] == KVN_PEER_GONE


def test_a_missing_generation_table_is_an_error(worker: UcxWorker, peer: UcxPeer) -> None:
    """The failure does not affect later endpoints of the worker."""
    endpoint = peer.endpoint(worker, generations_address=4096)
    with pytest.raises(UcxError, match=r"the peer's (UCX is lost|memory cannot be read)") as caught:
        endpoint.connect(TIMEOUT_MS)
    assert caught.value.status == KVN_PEER_GONE
    assert peer.connect(worker).connected


def test_a_peer_without_a_common_transport_is_an_error(worker: UcxWorker, peer: UcxPeer) -> None:
    with found():
        alone = open_worker(UCX_TLS="self")
    endpoint = peer.endpoint(alone)
    with pytest.raises(UcxError, match="UCX cannot reach the peer") as caught:
        endpoint.connect(TIMEOUT_MS)
    assert caught.value.status == KVN_PEER_GONE
    alone.close()


def test_an_endpoint_fails_once(worker: UcxWorker, peer: UcxPeer) -> None:
    endpoint = peer.connect(worker)
    endpoint.close("no more of you")
    endpoint.close("too late")
    assert dead(endpoint) == (KVN_CANCELLED, "no more of you")
    with pytest.raises(UcxError, match="no more of you"):
        endpoint.connect(TIMEOUT_MS)


def test_closing_a_worker_closes_its_endpoints(peer: UcxPeer) -> None:
    with found():
        worker = open_worker()
    endpoints = [peer.connect(worker), peer.endpoint(worker), peer.connect(worker)]
    for _ in range(2):
        worker.close()
        assert [endpoint.failure for endpoint in endpoints] == [
            (KVN_CANCELLED, "its engine was closed")
        ] * 3
    with pytest.raises(UcxError, match="this worker of UCX is closed"):
        peer.endpoint(worker)
    endpoints[0].close()


def test_several_threads_may_close_a_worker(peer: UcxPeer) -> None:
    """The worker is closed when any of the calls returns."""
    start, closed = threading.Barrier(3), []

    def close(worker: UcxWorker, endpoint: UcxEndpoint) -> None:
        start.wait()
        worker.close()
        closed.append(endpoint.failure)

    for _ in range(5):  # some calls find the worker closed already
        closed.clear()
        with found():
            worker = open_worker()
        endpoint = peer.connect(worker)
        threads = [
            threading.Thread(target=close, args=(worker, endpoint), daemon=True) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_MS / 1000)
        assert closed == [(KVN_CANCELLED, "its engine was closed")] * 3


def test_writes_of_a_peer_to_other_owners_are_not_waited_for(
    worker: UcxWorker, peer: UcxPeer
) -> None:
    """All writers share the table of the peer; an owner finds its own tickets there."""
    words = [TAG << 32 | 7, 0, (TAG + 1) << 32 | 7, TAG, TAG << 32 | 8, 1 << 63 | TAG << 32]
    set_words = """
        import ctypes
        table = (ctypes.c_uint64 * len(words)).from_address(tickets.address)
        table[:] = words
    """
    endpoint = peer.connect(worker)
    peer.run(set_words, words=words)
    found = [endpoint.writing(tag, TIMEOUT_MS) for tag in (TAG, TAG + 1, 0, 5)]
    peer.run(set_words, words=[0] * len(words))
    assert found == [{(0, words[0]), (4, words[4])}, {(2, words[2])}, {(3, words[3])}, set()]
    assert endpoint.writing(TAG, TIMEOUT_MS) == set()


def test_wrong_arguments_are_refused(worker: UcxWorker, peer: UcxPeer) -> None:
    with pytest.raises(ValueError, match="must have at least 1 byte"):
        peer.endpoint(worker, address=b"")
    with pytest.raises(ValueError, match="num_slots is 0; it must be at least 1"):
        peer.endpoint(worker, num_slots=0)
    with pytest.raises(ValueError, match="timeout_ms is 0; it must be > 0"):
        peer.endpoint(worker).connect(0)
    with pytest.raises(TypeError, match=r"comes from UcxWorker\.endpoint"):
        UcxEndpoint()


def test_workers_and_endpoints_close_their_files(peer: UcxPeer) -> None:
    with found():
        open_worker().close()  # opens files that UCX opens only once
        before = Held.now()
        for _ in range(3):
            worker = open_worker()
            endpoint = peer.connect(worker)
            worker.close()
            del endpoint, worker
            before.check_nothing_new()
