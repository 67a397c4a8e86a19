"""Requests in the caches of several groups, one of which has a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvplan import BlockLease, Cache, CacheDesc, DataType, LLMException, Rows, Shard
from kvplan.serving import Place, Source, Table
from kvplan.serving.tables import CacheGroup, GroupLease, decode_leases, missing_of, tables_of
from tests.serving.group_worker import GroupWorker, Tables
from tests.serving.peer import Peer
from tests.serving.worker import reference
from tests.support.refusals import refused

# 21 tokens in blocks of 8. The window has left the first block, whose id another block may have.
THEIRS: Tables = (([9, 2], 1), ([4, 11, 7], 0))
MINE: Tables = (([1, 30], 1), ([8, 3, 6], 0))

MakeGroupPeer = Callable[..., Source]


@pytest.fixture
def consumer() -> Iterator[GroupWorker]:
    worker = GroupWorker(2)
    yield worker
    worker.close()


@pytest.fixture
def make_consumer() -> Iterator[Callable[..., GroupWorker]]:
    with ExitStack() as held:

        def make(cluster_id: int, **options: int) -> GroupWorker:
            worker = GroupWorker(cluster_id, **options)
            held.callback(worker.close)
            return worker

        yield make


def start(peer: Peer, cluster_id: int = 10, name: str = "w", **options: int) -> Source:
    """Make a worker with groups in the peer's process."""
    code = f"{name} = GroupWorker(cluster_id, **options); result = {name}.source.address"
    return Source(cluster_id, str(peer.run(code, cluster_id=cluster_id, options=options)))


def finish(peer: Peer, sequence: int, request: int, tables: Tables, name: str = "w") -> None:
    code = f"{name}.finish(sequence, request, tables, 21)"
    peer.run(code, sequence=sequence, request=request, tables=tables)


def text(error: Exception | None) -> str:
    assert isinstance(error, LLMException)
    return str(error)


def test_all_groups_are_fetched_and_then_free(
    make_peer: Callable[..., Peer], consumer: GroupWorker
) -> None:
    peer = make_peer()
    source = start(peer)
    finish(peer, 0, 11, THEIRS)
    assert peer.run("result = len(w.engine.leases())") == 2
    assert consumer.fetch(reference([source], 0, 11, 21), MINE).error is None
    assert consumer.has(11, MINE, 0, 21)
    assert consumer.written() == {1, 30, 8, 3, 6}
    assert peer.run("result = w.freed()") == {"request-11"}
    assert peer.run("result = w.engine.leases()") == []


def test_all_groups_move_in_one_transfer(
    make_peer: Callable[..., Peer], consumer: GroupWorker
) -> None:
    peer = make_peer()
    source = start(peer)
    finish(peer, 0, 11, THEIRS)
    plans: list[str] = []
    consumer.engine.on_plan(lambda plan: plans.append(plan.operation))
    assert consumer.fetch(reference([source], 0, 11, 21), MINE).error is None
    assert plans == ["pull_groups"]


def test_blocks_of_the_prefix_cache_are_not_touched(
    make_peer: Callable[..., Peer], consumer: GroupWorker
) -> None:
    peer = make_peer()
    source = start(peer)
    finish(peer, 0, 11, THEIRS)
    for array in consumer.arrays:
        array[[1, 8, 3]] = 5  # tokens 0 to 15 are here, as far as each group still needs them
    result = consumer.fetch(reference([source], 0, 11, 21), MINE, first=16)
    assert (result.error, result.nbytes) == (None, 2 * 2 * 5 * 4 * 8 * 4)  # 5 tokens of each group
    assert consumer.has(11, MINE, 16, 21)
    for array in consumer.arrays:
        assert (array[[1, 8, 3]] == 5).all()
    assert consumer.written() == {1, 30, 8, 3, 6}


def test_only_the_window_of_the_consumer_is_fetched(
    make_peer: Callable[..., Peer], consumer: GroupWorker
) -> None:
    peer = make_peer()
    source = start(peer)
    finish(peer, 0, 11, (([5, 9, 2], 0), ([4, 11, 7], 0)))
    mine: Tables = (([30], 2), ([8, 3, 6], 0))
    assert consumer.fetch(reference([source], 0, 11, 21), mine).error is None
    assert consumer.has(11, mine, 0, 21)
    assert consumer.written() == {30, 8, 3, 6}


def test_a_window_beyond_the_missing_tokens_is_an_error(
    make_peer: Callable[..., Peer], consumer: GroupWorker
) -> None:
    peer = make_peer()
    source = start(peer)
    finish(peer, 0, 11, (([2], 2), ([4, 11, 7], 0)))
    result = consumer.fetch(reference([source], 0, 11, 21), MINE)
    assert "token 8 is missing of window; the producer only has tokens from 16 on" in text(
        result.error
    )
    assert consumer.written() == set()
    assert peer.run("result = w.freed()") == {"request-11"}


def test_a_stale_reference_is_refused(
    make_peer: Callable[..., Peer], consumer: GroupWorker
) -> None:
    peer = make_peer()
    source = start(peer)
    finish(peer, 0, 11, THEIRS)
    stale = reference([source], 0, 11, 21)
    assert consumer.fetch(stale, MINE).error is None
    assert peer.run("result = w.freed()") == {"request-11"}
    finish(peer, 1, 12, (([4, 11], 1), ([9, 2, 7], 0)))  # blocks change their group
    assert "request 00000000 has ended" in text(consumer.fetch(stale, MINE).error)
    assert consumer.has(11, MINE, 0, 21)


@pytest.mark.parametrize(("owners", "readers"), [(2, 1), (1, 2), (2, 2)])
def test_numbers_of_workers_may_differ(
    make_peer: Callable[..., Peer],
    make_consumer: Callable[..., GroupWorker],
    owners: int,
    readers: int,
) -> None:
    peer = make_peer()
    names = [f"w{index}" for index in range(owners)]
    sources = [
        start(peer, 10 + item, name, place=Place(item, owners)) for item, name in enumerate(names)
    ]
    for item in names:
        finish(peer, 0, 11, THEIRS, item)
    for rank in range(readers):
        consumer = make_consumer(100 + rank, place=Place(rank, readers))
        assert consumer.fetch(reference(sources, 0, 11, 21), MINE).error is None
        assert consumer.has(11, MINE, 0, 21)
    for item in names:
        assert peer.run(f"result = {item}.freed()") == {"request-11"}


def test_one_group_with_a_window(
    make_peer: Callable[..., Peer], make_consumer: Callable[..., GroupWorker]
) -> None:
    peer, consumer = make_peer(), make_consumer(2, groups=1)
    source = start(peer, groups=1)
    finish(peer, 0, 11, THEIRS[:1])
    plans: list[str] = []
    consumer.engine.on_plan(lambda plan: plans.append(plan.operation))
    assert consumer.fetch(reference([source], 0, 11, 21), MINE[:1]).error is None
    assert consumer.has(11, MINE[:1], 0, 21)
    assert plans == ["pull_blocks"]


def test_leases_of_other_groups_are_refused(
    make_peer: Callable[..., Peer], consumer: GroupWorker
) -> None:
    peer = make_peer()
    source = start(peer, groups=1)
    finish(peer, 0, 11, THEIRS[:1])
    result = consumer.fetch(reference([source], 0, 11, 21), MINE)
    assert "got leases of 1 groups; this side has 2" in text(result.error)


def test_each_group_needs_a_table(consumer: GroupWorker) -> None:
    assert tables_of([3, 1], 1) == (Table([3, 1]),)
    assert tables_of([Table([3], 1)], 1) == (Table([3], 1),)
    for blocks in ([3, 1], [Table([3])], [Table([3]), Table([1]), Table([2])]):
        with refused("LLM_PARAM_INVALID", "must have a Table for each of 2 groups"):
            tables_of(blocks, 2)  # type: ignore[arg-type]
    result = consumer.fetch(reference([Source(7, "127.0.0.1:1")], 0, 11, 21), MINE[:1])
    assert result.error is not None


@pytest.mark.parametrize(
    ("num_tokens", "first_token", "units"), [(24, 8, 4), (22, 8, 4), (21, 20, 1), (20, 20, 0)]
)
def test_the_last_unit_of_a_request_is_fetched_whole(
    num_tokens: int, first_token: int, units: int
) -> None:
    """Some processors order tokens so that no token of a unit lies in one place."""
    desc = CacheDesc(2, (32, 2, 6), DataType.DT_INT8, kv_tensor_format="block token dim")
    group = CacheGroup("", Cache(desc, 1), token_unit=4)
    lease = BlockLease(10, bytes(16), 1, 0, (4, 11, 7), True, "", ())
    leases = [[GroupLease(lease, 0)]]
    found, nbytes = missing_of([group], leases, [8, 3, 6], first_token, num_tokens)
    first = first_token // 4
    assert nbytes == units * 2 * 6
    assert [
        (item.num_tokens, item.src.first_token, item.dst.first_token) for item in found.values()
    ] == ([(units, first, first)] if units else [])


def test_a_request_begins_at_a_whole_unit() -> None:
    """The first token of a unit alone cannot be written beside the others."""
    desc = CacheDesc(2, (32, 2, 6), DataType.DT_INT8, kv_tensor_format="block token dim")
    group = CacheGroup("", Cache(desc, 1), token_unit=4)
    lease = BlockLease(10, bytes(16), 1, 0, (4, 11, 7), True, "", ())
    with refused("LLM_PARAM_INVALID", "first_token=10 must be a multiple of 4"):
        missing_of([group], [[GroupLease(lease, 0)]], [8, 3, 6], 10, 24)
    assert missing_of([group], [[GroupLease(lease, 0)]], [8, 3, 6], 26, 24) == ({}, 0)


@pytest.mark.parametrize("first_token", [0, 20, 21])
@pytest.mark.parametrize("sources", [1, 2])
def test_a_state_is_fetched_whole_unless_no_token_is_missing(
    first_token: int, sources: int
) -> None:
    """A prefix in the local cache does not help: the state is that after the last token."""
    desc = CacheDesc(2, (32, 3, 6), DataType.DT_INT8, kv_tensor_format="block head state")
    group = CacheGroup("g", Cache(desc, 1))
    lease = BlockLease(10, bytes(16), 1, 0, (4,), True, "", ())
    leases = [[GroupLease(lease, 0)] for _ in range(sources)]
    found, nbytes = missing_of([group], leases, [Table([8])], first_token, 21)
    if first_token == 21:
        assert (found, nbytes) == ({}, 0)
        return
    assert nbytes == 2 * 3 * 6
    (transfer,) = found.values()
    assert isinstance(transfer.dst, Rows)
    assert (transfer.dst.blocks, transfer.num_tokens) == ([8], None)
    for blocks in ([], [8, 9]):
        with refused("LLM_PARAM_INVALID", "g: a state is one block"):
            missing_of([group], leases, [Table(blocks)], first_token, 21)


def test_other_bytes_than_a_grant_are_refused() -> None:
    with refused("LLM_PARAM_INVALID", "is not a grant of leases"):
        decode_leases(b"lease")


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("skipped", [0, 1, 2])
@pytest.mark.parametrize("missing", [0, 6, 8, 14, 18])
@pytest.mark.parametrize("tokens", [19, 24])
@pytest.mark.parametrize("begin", [0, 4])
def test_each_missing_token_goes_to_its_block(
    unit: int, skipped: int, missing: int, tokens: int, begin: int
) -> None:
    """A table may skip blocks and include blocks of later tokens; the lease begins elsewhere."""
    desc = CacheDesc(1, (32, 8 // unit, 2), DataType.DT_FLOAT, kv_tensor_format="block token dim")
    group = CacheGroup("g", Cache(desc, 1), unit)
    blocks = [20, 21, 22, 23, 24][skipped:]
    lease = BlockLease(1, bytes(16), 1, 1, (5, 6, 7), True, "", ())
    first = max(missing, 8 * skipped)
    arguments = [group], [(GroupLease(lease, begin),)], (Table(blocks, skipped),), missing, tokens
    if begin > first:
        with refused("LLM_KV_CACHE_NOT_EXIST", f"token {first} is missing of g"):
            missing_of(*arguments)
        return
    transfers, _ = missing_of(*arguments)
    (transfer,) = transfers.values()
    read, written = transfer.src, transfer.dst
    assert begin + read.first_token * unit == first
    for token in range(first, tokens):
        position = written.first_token * unit + token - first
        assert written.blocks[position // 8] == 20 + token // 8
        assert position % 8 == token % 8
    assert written.blocks[-1] == 20 + (tokens - 1) // 8
    last_unit = first // unit + transfer.num_tokens
    assert (last_unit - 1) * unit < tokens <= last_unit * unit


@pytest.mark.parametrize("starts", [(0, 8), (8, 0), (8, 16), (16, 8)])
def test_leases_with_different_starts_are_refused(starts: tuple[int, int]) -> None:
    """The rows of two leases differ, even if both have the first missing token."""
    desc = CacheDesc(1, (32, 8, 2), DataType.DT_FLOAT, kv_tensor_format="block token dim")
    group = CacheGroup("", Cache(desc, 1))
    lease = BlockLease(1, bytes(16), 1, 1, (5, 6, 7), True, "", ())
    leases = [(GroupLease(lease, start),) for start in starts]
    with refused("LLM_KV_CACHE_NOT_EXIST", f"only has tokens from {max(starts)} on"):
        missing_of([group], leases, [20, 21, 22], 16, 24)


@pytest.mark.parametrize(("axes", "nbytes"), [("token dim", 2 * 5 * 6), ("head state", 2 * 3 * 6)])
def test_bytes_between_the_blocks_are_not_counted(axes: str, nbytes: int) -> None:
    """Pages of states are padded by vLLM to the size of pages of attention."""
    desc = CacheDesc(
        2, (32, 3, 6), DataType.DT_INT8, kv_tensor_format=f"block {axes}", row_stride=50
    )
    lease = BlockLease(10, bytes(16), 1, 0, (4, 5), True, "", ())
    leases = [[GroupLease(lease, 0)]]
    table = Table([8, 9] if axes == "token dim" else [8])
    assert missing_of([CacheGroup("", Cache(desc, 1))], leases, [table], 1, 6)[1] == nbytes


def test_a_range_of_tokens_is_not_shared_out() -> None:
    """A shard with a range has all tokens of the requests that lie in the range."""
    shape, kind = (32, 8, 6), DataType.DT_INT8
    desc = CacheDesc(
        2, shape, kind, kv_tensor_format="block token dim", shard=Shard(tokens=range(64))
    )
    leases = [[GroupLease(BlockLease(10, bytes(16), 1, 0, (4, 5), True, "", ()), 0)]]
    transfers, nbytes = missing_of([CacheGroup("", Cache(desc, 1))], leases, [8, 9], 1, 14)
    assert nbytes == 2 * 13 * 6
    assert transfers[""].num_tokens == 13
