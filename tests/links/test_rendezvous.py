"""link(comm_name, ...): members find each other by name, in any order and on any host."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvplan import LLMException, LLMStatusCode
from kvplan.control.endpoint import Endpoint
from kvplan.links import LinkState, RegisterMemStatus
from kvplan.links.peer_link import PeerLink
from kvplan.links.rendezvous import Communicator, Location
from tests.links.end import DEADLINE_S, End, settle
from tests.links.peer import Peer
from tests.support.refusals import refused

MakeEnd = Callable[..., End]
OK, PREPARING, FAILED = (
    RegisterMemStatus.OK,
    RegisterMemStatus.PREPARING,
    RegisterMemStatus.FAILED,
)


@pytest.mark.parametrize("order", [[1, 2], [2, 1]])
def test_two_processes_find_each_other(
    make_end: MakeEnd, make_peer: Callable[..., Peer], comm_dir: str, order: list[int]
) -> None:
    end = make_end(order[0], listen="", comm_dir=comm_dir)
    peer = make_peer(order[1], listen="", comm_dir=comm_dir)
    members = {1: 0, 2: 1}
    comm_id = end.links.comm_link("name", members)
    assert comm_id == 1
    assert end.links.comm_status(comm_id) is PREPARING
    assert peer.run(f"result = end.links.comm_link('name', {members})") == 1
    assert settle(end, comm_id) is OK
    peer.run(f"end.log.wait_for_line('comm cluster={order[1]} comm_id=1 ')")
    (status,) = end.links.status()
    assert (status.cluster_id, status.comm_id) == (order[1], 1)
    assert status.address.startswith(f"ipc://{comm_dir}/")
    assert peer.state(order[0]) == "LINKED"
    end.links.comm_unlink(comm_id)
    assert end.links.status() == []
    assert peer.state(order[0]) is None
    peer.run("end.links.comm_unlink(1)")
    assert list(Path(comm_dir).iterdir()) == []


def test_four_members_at_once_and_again(make_end: MakeEnd, comm_dir: str) -> None:
    ends = [make_end(i, listen="", comm_dir=comm_dir) for i in (4, 2, 7, 1)]
    members = {1: 0, 2: 0, 4: 3, 7: 3}
    for expected_id in (1, 2):
        with ThreadPoolExecutor(4) as threads:
            ids = list(threads.map(lambda end: end.links.comm_link("all", members), ends))
        assert ids == [expected_id] * 4
        assert [settle(end, expected_id) for end in ends] == [OK] * 4
        assert [end.links.live() for end in ends] == [3] * 4
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda end, side: end.links.comm_unlink(side), ends, ids))
        assert [end.links.live() for end in ends] == [0] * 4


def test_a_member_that_never_arrives(make_end: MakeEnd, comm_dir: str) -> None:
    end = make_end(1, listen="", comm_dir=comm_dir, link_total_time=1)
    comm_id = end.links.comm_link("alone", {1: 0, 2: 1})
    assert settle(end, comm_id) is FAILED
    why = (
        r"the last attempt failed: communicator 'alone': clusters \[2\] have not linked within 1 "
        f"s: cluster 2 has not connected to ipc://{comm_dir}/[0-9a-f]{{18}}; a member in another "
    )
    with pytest.raises(LLMException, match=f"cluster 2 is not linked; {why}"):
        end.links.get(2)
    end.links.comm_unlink(comm_id)
    _refuse_not_linked(end, comm_id)


def test_each_member_that_never_arrives_has_the_reason(make_end: MakeEnd, comm_dir: str) -> None:
    end = make_end(1, listen="", comm_dir=comm_dir, link_total_time=1)
    comm_id = end.links.comm_link("alone", {1: 0, 2: 1, 3: 2, 4: 3})
    assert settle(end, comm_id) is FAILED
    for missing in (2, 3, 4):
        why = f"cluster {missing} is not linked; the last attempt failed: communicator 'alone'"
        with pytest.raises(LLMException, match=why):
            end.links.get(missing)
    end.links.comm_unlink(comm_id)


@pytest.mark.parametrize("is_far", [False, True], ids=["on this host", "on another host"])
def test_only_members_that_have_not_linked_are_named(
    make_end: MakeEnd, comm_dir: str, is_far: bool
) -> None:
    """Two members are linked: one has listened, and the other has connected."""
    # Addresses of this host that no other process uses.
    high, middle, low = os.getpid().to_bytes(3, "big")
    hosts = [f"127.{first + high}.{middle}.{low}" for first in (1, 128)]
    ranks = {hosts[0]: "01", hosts[1]: "2"} if is_far else {hosts[0]: "012"}
    servers = [
        {"server_id": host, "device": [{"rank_id": rank, "device_id": rank} for rank in its]}
        for host, its in ranks.items()
    ]
    table = json.dumps({"version": "1.2", "server_list": servers})
    for total_s in (1, 4, 16):  # a loaded machine may need longer to link two of them
        one, two = (
            make_end(i, listen="", comm_dir=comm_dir, link_total_time=total_s) for i in (1, 2)
        )
        for end in (one, two):
            end.links.comm_link("name", {1: 0, 2: 1, 3: 2}, table)
        lines = [
            end.log.wait_for_line(f"comm cluster={end.cluster_id} comm_id=1 ") for end in (one, two)
        ]
        is_linked = LinkState.LINKED is one.state(2) is two.state(1)
        for end in (one, two):
            end.links.comm_unlink(1)
        if is_linked:
            break
        one.close()
        two.close()
    for line in lines:
        assert f"clusters [3] have not linked within {total_s} s: cluster 3 has not" in line
        assert line.count(" has not ") == 1
        assert ("a member in another container" in line) is not is_far
    for end, other in ((one, 2), (two, 1)):
        with refused(LLMStatusCode.LLM_NOT_YET_LINK, f"^cluster {other} is not linked .LLM_"):
            end.links.get(other)
        with refused(LLMStatusCode.LLM_NOT_YET_LINK, "the last attempt failed: communicator"):
            end.links.get(3)


def test_an_orderly_end_does_not_count_as_a_failure(make_end: MakeEnd, comm_dir: str) -> None:
    """A caller that polls rarely would take that for a link that was never made."""
    one, two = (make_end(i, listen="", comm_dir=comm_dir) for i in (1, 2))
    first, second = (end.links.comm_link("name", {1: 0, 2: 1}) for end in (one, two))
    assert settle(one, first) is settle(two, second) is OK
    one.links.comm_unlink(first)
    two.wait_for(1, "UNLINKED")
    assert two.links.comm_status(second) is OK
    two.links.comm_unlink(second)
    _refuse_not_linked(two, second)


def test_the_second_of_two_unlinks_finds_the_communicator_gone(
    make_end: MakeEnd, comm_dir: str
) -> None:
    end = make_end(1, listen="", comm_dir=comm_dir)
    comm_id = end.links.comm_link("name", {1: 0, 2: 1})

    async def both() -> list[BaseException | None]:
        unlink = end.links._rendezvous.unlink
        return await asyncio.gather(unlink(comm_id), unlink(comm_id), return_exceptions=True)

    first, second = end.links._run(both())
    assert first is None
    assert isinstance(second, LLMException)
    assert second.status_code is LLMStatusCode.LLM_NOT_YET_LINK


def test_unlink_while_preparing(make_end: MakeEnd, comm_dir: str) -> None:
    one, two = (make_end(i, listen="", comm_dir=comm_dir) for i in (1, 2))
    for end in (one, two):
        first = end.links.comm_link("changed my mind", {1: 0, 2: 1, 3: 2})
        end.links.comm_unlink(first)
        _refuse_not_linked(end, first)
    assert [end.links.comm_link("name", {1: 0, 2: 1}) for end in (one, two)] == [2, 2]
    assert [settle(end, 2) for end in (one, two)] == [OK, OK]


def test_a_member_that_dies_ends_the_communicator(
    make_end: MakeEnd, make_peer: Callable[..., Peer], comm_dir: str
) -> None:
    end = make_end(2, listen="", comm_dir=comm_dir)
    peer = make_peer(1, listen="", comm_dir=comm_dir)
    peer.run("end.links.comm_link('name', {1: 0, 2: 1})")
    comm_id = end.links.comm_link("name", {1: 0, 2: 1})
    assert settle(end, comm_id) is OK
    peer.kill()
    end.wait_for(1, "BROKEN")
    assert end.links.comm_status(comm_id) is FAILED
    end.links.comm_unlink(comm_id)
    again = make_peer(1, listen="", comm_dir=comm_dir)  # the old socket is still there
    again.run("end.links.comm_link('name', {1: 0, 2: 1})")
    assert settle(end, end.links.comm_link("name", {1: 0, 2: 1})) is OK


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a bug"),
        LLMException("in use", status_code=LLMStatusCode.LLM_LINK_BUSY),
        LLMException("no answer", status_code=LLMStatusCode.LLM_UNLINK_FAILED),
    ],
    ids=str,
)
def test_only_an_error_at_this_end_keeps_a_communicator(
    make_end: MakeEnd, comm_dir: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A link that has ended at this end does not keep it, though the peer may not know."""
    one, two = (make_end(i, listen="", comm_dir=comm_dir) for i in (1, 2))
    for end in (one, two):
        end.links.comm_link("name", {1: 0, 2: 1})
    assert settle(one, 1) is OK

    async def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(one.links._rendezvous._unlinker, "unlink", refuse)
    if "no answer" in str(error):
        one.links.comm_unlink(1)
    else:
        with pytest.raises(type(error), match=str(error.args[0])):
            one.links.comm_unlink(1)
        assert one.links.comm_status(1) is OK
        monkeypatch.undo()
        one.links.comm_unlink(1)
    _refuse_not_linked(one, 1)


def test_transfers_in_flight_keep_the_communicator(make_end: MakeEnd, comm_dir: str) -> None:
    one, two = (make_end(i, listen="", comm_dir=comm_dir) for i in (1, 2))
    for end in (one, two):
        end.links.comm_link("name", {1: 0, 2: 1})
    assert settle(one, 1) is OK
    link = one.links.get(2)
    link.begin(link)
    with refused(LLMStatusCode.LLM_LINK_BUSY, "1 operation in flight"):
        one.links.comm_unlink(1)
    assert one.links.comm_status(1) is OK
    link.end(link)
    one.links.comm_unlink(1)


def test_a_link_that_may_be_kept_does_not_count_as_lost(make_end: MakeEnd, comm_dir: str) -> None:
    one, two = (make_end(i, listen="", comm_dir=comm_dir) for i in (1, 2))
    for end in (one, two):
        end.links.comm_link("name", {1: 0, 2: 1})
    assert settle(one, 1) is OK
    link = one.links.get(2)
    link.begin(link)
    with ThreadPoolExecutor(1) as threads:
        unlinking = threads.submit(one.links.unlink, [2], 600_000)
        try:
            one.wait_until(2, LinkState.UNLINKING)
            assert one.links.comm_status(1) is OK
        finally:
            link.end(link)
        unlinking.result(DEADLINE_S).raise_for_status()


def test_transfers_over_a_link_that_is_made_during_an_unlink_keep_the_communicator(
    make_end: MakeEnd, comm_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = (make_end(i, listen="", comm_dir=comm_dir) for i in (1, 2, 3))
    for end in (one, two):
        end.links.comm_link("name", {1: 0, 2: 1, 3: 2})
    one.wait_for(2, "LINKED")
    unlinker = one.links._rendezvous._unlinker
    unlink = unlinker.unlink

    async def slow(*arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        three.links.comm_link("name", {1: 0, 2: 1, 3: 2})
        async with asyncio.timeout(DEADLINE_S):
            while one.state(3) is not LinkState.LINKED:
                await asyncio.sleep(0)
        link = one.links.get(3)
        link.begin(link)
        await unlink(*arguments, **options)

    monkeypatch.setattr(unlinker, "unlink", slow)
    with refused(LLMStatusCode.LLM_LINK_BUSY, "1 operation in flight with cluster 3"):
        one.links.comm_unlink(1)
    link = one.links.get(3)
    assert link.state is LinkState.LINKED
    link.end(link)
    one.links.comm_unlink(1)
    assert one.links.status() == []


def test_an_unlink_that_fails_while_a_member_is_missing_ends_the_preparation(
    make_end: MakeEnd, comm_dir: str
) -> None:
    one, two = (make_end(i, listen="", comm_dir=comm_dir) for i in (1, 2))
    for end in (one, two):
        end.links.comm_link("name", {1: 0, 2: 1, 3: 2})
    one.wait_for(2, "LINKED")
    link = one.links.get(2)
    link.begin(link)
    with refused(LLMStatusCode.LLM_LINK_BUSY, "1 operation in flight"):
        one.links.comm_unlink(1)
    assert one.links.comm_status(1) is FAILED
    link.end(link)
    one.links.comm_unlink(1)


def test_an_unlink_that_is_interrupted_ends_the_preparation(
    make_end: MakeEnd, comm_dir: str
) -> None:
    links = make_end(1, listen="", comm_dir=comm_dir).links
    links.comm_link("name", {1: 0, 2: 1})

    async def interrupted() -> None:
        unlinking = asyncio.create_task(links._rendezvous.unlink(1))
        await asyncio.sleep(0)  # to its first wait
        unlinking.cancel()
        await asyncio.wait((unlinking,))
        assert unlinking.cancelled()

    links._run(interrupted())
    assert links.comm_status(1) is FAILED
    links.comm_unlink(1)


def test_an_engine_of_another_communicator_of_that_name_is_refused(
    make_end: MakeEnd, comm_dir: str
) -> None:
    """The other engine connects to the meeting point of the members, and does not disturb them."""
    one, two = (make_end(i, comm_dir=comm_dir) for i in (1, 2))
    other = make_end(3, comm_dir=comm_dir, link_total_time=1)
    for end in (one, two):
        end.links.comm_link("name", {1: 0, 2: 0})
    other.links.comm_link("name", {1: 0, 3: 0})
    assert [settle(end, 1) for end in (one, two)] == [OK, OK]
    line = other.log.wait_for_line(" cluster=3 ")
    assert line.startswith("WARNING comm cluster=3 comm_id=1 ")
    assert "state=FAILED" in line
    assert "is not linking communicator 'name' with cluster 3" in line.replace("\\", "")
    assert [one.state(2), one.state(3), other.state(1)] == [LinkState.LINKED, None, None]


def test_members_may_be_linked_by_address_before(make_end: MakeEnd, comm_dir: str) -> None:
    one, two = (make_end(i, comm_dir=comm_dir, link_total_time=5) for i in (1, 2))
    one.link(two.cluster)
    for end in (one, two):
        end.links.comm_link("name", {1: 0, 2: 1})
    assert [settle(end, 1) for end in (one, two)] == [FAILED, FAILED]
    assert one.state(2) is LinkState.LINKED
    one.links.comm_unlink(1)
    assert one.state(2) is LinkState.LINKED


@pytest.mark.parametrize("name", ["", "other", "name"])
def test_a_link_that_was_made_in_another_way_meanwhile_is_left_alone(
    make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An attempt may end with the link that the other end has made, by address or another name."""
    links = make_end(2, listen="").links
    link = PeerLink(1, "", name, links._control, 1000)
    comm = Communicator(7, "name", {1: Location(), 2: Location()})

    async def found(*_: object) -> PeerLink:
        return link

    monkeypatch.setattr(links._initiator, "link", found)
    is_linked = links._run(links._rendezvous._try_link(comm, 1, Endpoint("127.0.0.1", 1)))
    assert is_linked is (name == "name")
    assert link.comm_id == (7 if is_linked else None)


class TestBadArguments:
    """Calls that are refused at once and take no id."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("", {1: 0, 2: 1}), r"comm_name has 0 characters; \[1, 127\] are allowed"),
            (("n" * 128, {1: 0, 2: 1}), "comm_name has 128 characters"),
            (("\ud800", {1: 0, 2: 1}), "comm_name='.ud800' is not Unicode text"),
            (("n", {1: 0}), r"cluster_rank_info has 1 member; \[2, 4\] are allowed"),
            (("n", dict.fromkeys(range(5), 0)), "cluster_rank_info has 5 members"),
            (("n", {1: 1, 2: 0}), "its ranks must not decrease"),
            (("n", {2: 0, 3: 1}), "lacks cluster 1"),
            (("n", {1: 0, 2: 1}, "{"), "rank_table='{': Input data was truncated"),
            (
                ("n", {1: 0, 2: 1}, '{"version": "2.0", "server_list": []}'),
                "version '2.0' is not one",
            ),
            (("n", {1: 0, 2: 1}, '{"version": "1.0", "server_list": []}'), "rank 0 is not in it"),
        ],
    )
    def test_members_that_break_a_rule_are_refused(
        self, end: End, arguments: tuple[Any, ...], message: str
    ) -> None:
        with refused(LLMStatusCode.LLM_PARAM_INVALID, message):
            end.links.comm_link(*arguments)
        _refuse_not_linked(end, 1)

    @pytest.mark.parametrize(
        "arguments",
        [
            (5, {1: 0, 2: 1}),
            ("n", [1, 2]),
            ("n", {"1": 0, 2: 1}),
            ("n", {1: 0, 2: "1"}),
            ("n", {1: 0, 2: 1}, None),
        ],
    )
    def test_arguments_of_a_wrong_type_are_refused(
        self, end: End, arguments: tuple[Any, ...]
    ) -> None:
        with pytest.raises(TypeError):
            end.links.comm_link(*arguments)

    @pytest.mark.parametrize("members", [{1: 0, -1: 1}, {1: 0, 2**64: 1}, {1: 0, 2: 2**32}])
    def test_numbers_out_of_range_are_refused(self, end: End, members: dict[int, int]) -> None:
        with pytest.raises(ValueError, match="is out of range"):
            end.links.comm_link("n", members)

    def test_unknown_ids_are_refused(self, end: End) -> None:
        _refuse_not_linked(end, 7)
        for act in (end.links.comm_status, end.links.comm_unlink):
            with pytest.raises(ValueError, match="comm_id=-1 is out of range"):
                act(-1)


def _refuse_not_linked(end: End, comm_id: int) -> None:
    for act in (end.links.comm_status, end.links.comm_unlink):
        with refused(LLMStatusCode.LLM_NOT_YET_LINK, f"comm_id={comm_id} is not linked"):
            act(comm_id)


@pytest.mark.parametrize("texts", [(), ("",)])
def test_a_preparation_that_fails_without_a_text_fails(
    make_end: MakeEnd, comm_dir: str, monkeypatch: pytest.MonkeyPatch, texts: tuple[str, ...]
) -> None:
    end = make_end(1, listen="", comm_dir=comm_dir)
    monkeypatch.setattr(
        "kvplan.links.rendezvous.check_above", Mock(side_effect=LLMException(*texts))
    )
    assert settle(end, end.links.comm_link("name", {1: 0, 2: 1})) is FAILED
