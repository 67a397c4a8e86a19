"""Links between engines of several users of a host."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvplan.control.auth import ClusterKey
from kvplan.links import ClusterInfo, LinkState
from tests.links.end import End
from tests.links.peer import Peer

UNPRIVILEGED = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def stranger(make_peer: Callable[..., Peer]) -> Iterator[Peer]:
    """A process of cluster 3 that belongs to another user with another home."""
    peer = make_peer(3, listen="")
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o700)
        os.chown(home, UNPRIVILEGED, UNPRIVILEGED)
        peer.run(
            "import os, encodings.idna  # while it may read this Python's folder\n"
            f"os.environ['XDG_STATE_HOME'] = {home!r}\n"
            "os.setgroups([])\n"
            f"os.setresgid(*[{UNPRIVILEGED}] * 3)\n"
            f"os.setresuid(*[{UNPRIVILEGED}] * 3)\n"
        )
        yield peer


LINK = "result = [str(link.error) for link in end.links.link([ClusterInfo({}, {!r})], 5000)]"


@needs_root
@pytest.mark.parametrize("listen", ["127.0.0.1:0", "0.0.0.0:0"])
def test_another_user_of_the_host_is_kept_out(
    make_end: Callable[..., End], peer: Peer, stranger: Peer, listen: str
) -> None:
    """Each end refuses the other user, but engines of one user still link."""
    end = make_end(1, listen=listen)
    address = end.address.replace("0.0.0.0", "127.0.0.1")
    (error,) = stranger.run(LINK.format(1, address))
    assert "authenticate: the peer has disconnected; it may have another key" in error
    assert f"this side uses the key of user {UNPRIVILEGED} (" in error
    assert "because kvplan.cluster_key_file is not given" in error
    assert peer.run(LINK.format(1, address)) == ["None"]
    theirs = stranger.run(
        "from kvplan.control.endpoint import Endpoint\n"
        "end.links.listen(Endpoint.parse('127.0.0.1:0')); result = str(end.links.endpoint)"
    )
    (result,) = end.links.link([ClusterInfo(3, theirs)], 5000)
    assert "this side uses the key of user 0 (" in str(result.error)
    assert end.links.live() == 1


@needs_root
def test_users_that_share_a_key_file_link(
    make_end: Callable[..., End], make_peer: Callable[..., Peer], tmp_path: Path
) -> None:
    file = str(tmp_path / "key")
    ClusterKey.generate().save(file)
    end = make_end(1, cluster_key_file=file)
    sharing = make_peer(2, listen="", cluster_key_file=file)
    sharing.run(f"import os, encodings.idna; os.setresuid(*[{UNPRIVILEGED}] * 3)")
    # The peers have authenticated. The rights that the local transport needs are not tested here.
    (said,) = sharing.run(LINK.format(1, end.address))
    assert "authenticate" not in said


def test_an_address_of_the_network_needs_no_key(make_end: Callable[..., End], peer: Peer) -> None:
    """A client that connects to its loopback address uses this user's key."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        ours = probe.getsockname()[0]
    end = make_end(1, listen="0.0.0.0:0")
    for host in (ours, "127.0.0.1"):
        peer.link(ClusterInfo(1, end.address.replace("0.0.0.0", host)))
        assert [state.state for state in end.links.status()] == [LinkState.LINKED]
        peer.run("end.links.unlink([1], 5000).raise_for_status()")
