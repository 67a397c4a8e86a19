"""Changes of the role, and with it of the listen address, while no link exists."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvplan import ClusterInfo, LlmDataDist, LLMException, LlmRole, LLMStatusCode, Options
from tests.datadist.conftest import MakeEngine, link
from tests.datadist.peer import OnItsOwn
from tests.support.places import CLUSTER_KEY, LISTEN
from tests.support.refusals import refused
from tests.support.rights import OWN_MOUNTS, needs_mounts

ANYWHERE = {"llm.ListenIpInfo": LISTEN}
without_key = pytest.mark.skipif(bool(CLUSTER_KEY), reason="engines on a network have a key")


def can_link(user: LlmDataDist, owner: LlmDataDist, address: str) -> bool:
    (result,) = user.link_clusters([ClusterInfo(owner.cluster_id, address)])
    if result.error is None:
        user.unlink_clusters([owner.cluster_id]).raise_for_status()
    return result.error is None


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other process is given at any address, but which may be named to listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", 0))
        yield int(holder.getsockname()[1])


def test_a_client_becomes_a_server_and_a_client_again(make_engine: MakeEngine) -> None:
    owner, user = make_engine(1), make_engine(2)
    assert owner.listen_address is None
    owner.set_role(LlmRole.PROMPT, ANYWHERE)
    address = owner.listen_address
    assert address is not None
    assert owner._role == LlmRole.PROMPT
    assert can_link(user, owner, address)
    owner.set_role(LlmRole.DECODER)
    assert owner.listen_address is None
    assert owner._role == LlmRole.DECODER
    assert not can_link(user, owner, address)


def test_a_server_moves(make_engine: MakeEngine, port: int) -> None:
    owner, user = make_engine(1, listen=True), make_engine(2)
    before = owner.listen_address
    assert before is not None
    after = f"127.0.0.1:{port}"
    owner.set_role(LlmRole.PROMPT, Options(listen_ip_info=after))
    assert owner.listen_address == after
    assert can_link(user, owner, after)
    assert not can_link(user, owner, before)


def test_a_server_that_does_not_move_keeps_listening(make_engine: MakeEngine) -> None:
    owner, user = make_engine(1, listen=True), make_engine(2)
    before = owner.listen_address
    owner.set_role(LlmRole.PROMPT, ANYWHERE)
    assert owner.listen_address == before is not None
    assert can_link(user, owner, before)


def test_the_peer_sees_the_role(make_engine: MakeEngine) -> None:
    owner, user = make_engine(1, listen=True), make_engine(2)
    owner.set_role(LlmRole.PROMPT, ANYWHERE)
    link(user, owner)
    assert [item.role for item in user.links()] == [LlmRole.PROMPT]


@pytest.mark.parametrize("end", [0, 1], ids=["server", "client"])
def test_a_role_does_not_change_while_links_exist(
    pair: tuple[LlmDataDist, LlmDataDist], end: int
) -> None:
    address = pair[end].listen_address
    with refused(LLMStatusCode.LLM_EXIST_LINK):
        pair[end].set_role(LlmRole.DECODER)
    assert (pair[end]._role, pair[end].listen_address) == (LlmRole.MIX, address)
    pair[1].unlink_clusters([1]).raise_for_status()
    pair[end].set_role(LlmRole.DECODER)


def test_an_address_in_use_is_refused(make_engine: MakeEngine) -> None:
    owner = make_engine(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LLMException, match=address):
            owner.set_role(LlmRole.PROMPT, {"ListenIpInfo": address})
    assert (owner._role, owner.listen_address) == (LlmRole.MIX, None)
    owner.set_role(LlmRole.PROMPT, {"ListenIpInfo": address})


@pytest.mark.parametrize("same_port", [False, True])
def test_a_server_that_cannot_move_stays(make_engine: MakeEngine, same_port: bool) -> None:
    owner, user = make_engine(1, listen=True), make_engine(2)
    before = owner.listen_address
    assert before is not None
    port = int(before.rpartition(":")[2]) if same_port else 0
    with socket.create_server(("127.0.0.2", port)) as taken:
        address = f"127.0.0.2:{taken.getsockname()[1]}"
        with pytest.raises(LLMException, match=f"cannot listen on {address}: Address already in"):
            owner.set_role(LlmRole.PROMPT, {"ListenIpInfo": address})
    assert (owner._role, owner.listen_address) == (LlmRole.MIX, before)
    assert can_link(user, owner, before)


@without_key
def test_opening_an_engine_to_unauthenticated_clients_warns(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    all_addresses = {"ListenIpInfo": "0.0.0.0:0"}
    engines = LlmDataDist(1, LlmRole.PROMPT), make_engine(2)
    with engines[0]:
        with pytest.warns(RuntimeWarning, match="without a cluster key") as initialized:
            engines[0].initialize(all_addresses)
        with pytest.warns(RuntimeWarning, match="without a cluster key") as set_role:
            engines[1].set_role(LlmRole.PROMPT, all_addresses)
        engines[1].set_role(LlmRole.DECODER, all_addresses)  # the engine listens there already
    assert [value.filename for value in (*initialized, *set_role)] == [__file__] * 2
    assert caplog.text.count("listen_open") == 2


@without_key
def test_a_warning_that_is_an_error_changes_nothing(make_engine: MakeEngine) -> None:
    owner = make_engine(1, listen=True)
    before = owner.listen_address
    with pytest.raises(RuntimeWarning):
        owner.set_role(LlmRole.PROMPT, {"ListenIpInfo": "0.0.0.0:0"})
    assert (owner._role, owner.listen_address) == (LlmRole.MIX, before)


@pytest.mark.filterwarnings("ignore:listening on 0.0.0.0")
def test_a_server_moves_to_another_address_with_its_port(
    make_engine: MakeEngine, port: int
) -> None:
    owner, user = make_engine(1), make_engine(2)
    for host in ("127.0.0.1", "0.0.0.0", "127.0.0.1"):  # the second includes the first
        owner.set_role(LlmRole.PROMPT, {"ListenIpInfo": f"{host}:{port}"})
        assert can_link(user, owner, f"127.0.0.1:{port}")


@pytest.mark.filterwarnings("ignore:listening on 0.0.0.0")
def test_an_address_that_stands_for_all_is_refused(make_engine: MakeEngine) -> None:
    owner, user = make_engine(1), make_engine(2)
    owner.set_role(LlmRole.PROMPT, {"ListenIpInfo": "0.0.0.0:0"})
    assert owner.listen_address is not None
    with refused("LLM_PARAM_INVALID", r"remote=0.0.0.0:\d+ stands for all .* kvplan.advertise"):
        user.link_clusters([ClusterInfo(1, owner.listen_address)])


def test_a_path_is_not_replaced_by_the_advertised_address(tmp_path: Path) -> None:
    """The variable KVPLAN_ADVERTISE may name the host for all engines, so paths ignore it."""
    with LlmDataDist(1, LlmRole.PROMPT) as owner:
        owner.initialize({"ListenIpInfo": f"ipc://{tmp_path}/socket", "kvplan.advertise": "node-1"})
        assert owner.listen_address == f"ipc://{tmp_path}/socket"


@needs_mounts
def test_a_host_name_that_is_loopback_is_warned_about(tmp_path: Path) -> None:
    """Debian's /etc/hosts has such a name."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node-1\n")
    mounted = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    with closing(OnItsOwn("host", prefix=[*OWN_MOUNTS, "sh", "-c", mounted, "-"])) as process:
        found = process.run(
            """
            import warnings
            found, here = [], (lambda: None).__code__.co_filename
            for host in ("node-1", "localhost", "127.0.1.1"):
                with warnings.catch_warnings(record=True) as caught, LlmDataDist(1, ROLE) as engine:
                    warnings.simplefilter("always")
                    engine.initialize({"ListenIpInfo": f"{host}:0"})
                found.append([str(each.message) for each in caught if each.filename == here])
            result = found
            """,
            ROLE=LlmRole.PROMPT,
        )
    assert found[1:] == [[], []]
    assert [text.partition(":0: ")[2] for text in found[0]] == [
        "node-1 resolves to 127.0.1.1 here, which only processes of this host reach; listen at the "
        "address of a network, or correct the name in /etc/hosts"
    ]


def test_only_the_address_can_be_given(make_engine: MakeEngine) -> None:
    owner = make_engine(1)
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "ListenIpInfo"):
        owner.set_role(LlmRole.PROMPT, {"SyncKvCacheWaitTime": "5"})
    with pytest.raises(TypeError, match="role"):
        owner.set_role("Prompt")  # type: ignore[arg-type]
