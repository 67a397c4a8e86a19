"""The producer's book: when blocks are free, and who gets a lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from kvplan import BlockLease, Cache, CacheDesc, DataType, LLMException, LLMStatusCode
from kvplan.serving import CacheGroup, LeaseBook, Table
from kvplan.serving.book import NotYetError
from tests.serving.worker import handle
from tests.support.refusals import refused

A, B = handle(0), handle(1)
CACHE = Cache(CacheDesc(num_tensors=1, shape=(8, 4), data_type=DataType.DT_FLOAT), 1)


class Engine:
    """Gives leases, and can refuse to."""

    def __init__(self) -> None:
        self.live: list[BlockLease] = []
        self.renewed: list[BlockLease] = []
        self.refusal: LLMStatusCode | None = None
        self.refused: frozenset[int] | None = None  # only of leases of these blocks

    def lease_blocks(
        self, cache: Cache, blocks: Sequence[int], *, tag: str = "", ttl_ms: float | None = None
    ) -> BlockLease:
        self._refuse(blocks)
        lease = BlockLease(1, bytes(16), 1, len(self.live), tuple(blocks), True, tag, ())
        self.live.append(lease)
        return lease

    def renew(self, lease: BlockLease, ttl_ms: float) -> None:
        self._refuse(lease.blocks)
        self.renewed.append(lease)

    def release(self, lease: BlockLease) -> None:
        self._refuse(lease.blocks)
        if lease in self.live:  # it may have ended
            self.live.remove(lease)

    def _refuse(self, blocks: Sequence[int]) -> None:
        if self.refusal is not None and (self.refused is None or self.refused & {*blocks}):
            raise LLMException("as the test says", status_code=self.refusal)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def clock() -> Callable[[float], float]:
    """Called with seconds: goes on; with 0: the time."""
    now = [100.0]

    def clock(seconds: float = 0) -> float:
        now[0] += seconds
        return now[0]

    return clock


@pytest.fixture
def book(engine: Engine, clock: Callable[[float], float]) -> Iterator[LeaseBook]:
    """Of leases of 5 s, with request "a" of handle 0."""
    book = LeaseBook(engine, CACHE, 5_000, clock=lambda: clock(0))
    book.enter("a", [3, 1], b"digest", handle=handle(0))
    yield book
    assert len(book) == len(engine.live)


def test_a_lease_names_the_blocks_and_the_request(book: LeaseBook) -> None:
    found, ((lease, first_token),) = book.leases_of(handle(0), b"digest")
    assert (found, first_token) == (A, 0)
    assert (lease.blocks, lease.tag) == ((3, 1), "a")


def test_it_is_given_for_the_same_tokens_alone(book: LeaseBook) -> None:
    with refused("LLM_KV_CACHE_NOT_EXIST", "request 00000000 has other tokens"):
        book.leases_of(handle(0), b"another")


def test_what_comes_later_may_come_yet(book: LeaseBook) -> None:
    with pytest.raises(NotYetError):
        book.leases_of(handle(1), b"digest")


def test_the_last_reader_frees(book: LeaseBook, engine: Engine) -> None:
    book.finish(handle(0), b"digest", reader=7, readers=2)
    book.finish(handle(0), b"digest", reader=7, readers=2)
    assert (book.take_freed(), len(engine.live)) == (set(), 1)
    book.finish(handle(0), b"digest", reader=8, readers=2)
    assert (book.take_freed(), engine.live) == ({A}, [])
    assert book.take_freed() == set()
    with refused("LLM_KV_CACHE_NOT_EXIST", "request 00000000 has ended"):
        book.leases_of(handle(0), b"digest")


def test_a_reader_of_other_tokens_frees_nothing(book: LeaseBook) -> None:
    book.finish(handle(0), b"another", reader=7, readers=1)
    assert book.take_freed() == set()


def test_time_frees_what_nobody_renews(
    book: LeaseBook, clock: Callable[[float], float], engine: Engine
) -> None:
    book.enter("b", [3], b"digest", handle=handle(1))  # block 3 belongs to both
    clock(4)
    book.renew([handle(1), handle(5)])
    book.expire()
    assert book.take_freed() == set()
    clock(2)
    book.expire()
    assert book.take_freed() == {A}
    assert [item.tag for item in engine.renewed] == ["b"]


def test_an_expired_lease_is_not_renewed(
    book: LeaseBook, clock: Callable[[float], float], engine: Engine
) -> None:
    clock(4)
    engine.refusal = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    book.renew([handle(0)])
    engine.refusal = None
    clock(2)
    book.expire()
    assert book.take_freed() == {A}


def test_abort_frees_at_once(book: LeaseBook) -> None:
    book.abort(handle(1))
    assert book.take_freed() == set()
    book.abort(handle(0))
    assert book.take_freed() == {A}


def test_what_a_peer_still_writes_to_is_not_free_yet(book: LeaseBook, engine: Engine) -> None:
    engine.refusal = LLMStatusCode.LLM_TIMEOUT
    book.abort(handle(0))
    assert (book.take_freed(), len(book)) == (set(), 1)
    with refused("LLM_KV_CACHE_NOT_EXIST", "has ended"):
        book.leases_of(handle(0), b"digest")
    engine.refusal = None
    book.expire()
    assert book.take_freed() == {A}


def test_what_cannot_be_leased_is_free(book: LeaseBook, engine: Engine) -> None:
    engine.refusal = LLMStatusCode.LLM_OUT_OF_MEMORY
    book.enter("b", [4], b"digest", handle=handle(1))
    assert book.take_freed() == {B}
    with refused(
        "LLM_KV_CACHE_NOT_EXIST", "request 01000000 could not be leased: as the test says"
    ):
        book.leases_of(handle(1), b"digest")
    engine.refusal = None


def test_a_long_name_is_cut_for_the_lease(book: LeaseBook) -> None:
    book.enter("x\a" * 100, [4], b"digest", handle=handle(1))
    assert book.leases_of(handle(1), b"digest")[1][0].lease.tag == "x?" * 32


PAGED = CacheDesc(
    num_tensors=1, shape=(8, 4, 2), data_type=DataType.DT_FLOAT, kv_tensor_format="block token dim"
)
GROUPS = [CacheGroup("window", Cache(PAGED, 1)), CacheGroup("full", Cache(PAGED, 2))]
TABLES = [Table([3], 2), Table([1, 4, 5])]


@pytest.fixture
def of_groups(engine: Engine, clock: Callable[[float], float]) -> LeaseBook:
    """Of two groups with blocks of 4 tokens."""
    return LeaseBook(engine, GROUPS, 5_000, clock=lambda: clock(0))


def test_a_request_has_a_lease_in_each_group(of_groups: LeaseBook, engine: Engine) -> None:
    of_groups.enter("a", TABLES, b"digest", handle=handle(0))
    _, leases = of_groups.leases_of(handle(0), b"digest")
    assert [(lease.lease.blocks, lease.first_token) for lease in leases] == [
        ((3,), 8),
        ((1, 4, 5), 0),
    ]
    of_groups.renew([handle(0)])
    assert [item.blocks for item in engine.renewed] == [(3,), (1, 4, 5)]
    of_groups.finish(handle(0), b"digest", reader=7, readers=1)
    assert (of_groups.take_freed(), engine.live) == ({A}, [])


def test_what_cannot_be_leased_in_all_groups_is_leased_in_none(
    of_groups: LeaseBook, engine: Engine
) -> None:
    engine.refusal, engine.refused = LLMStatusCode.LLM_OUT_OF_MEMORY, frozenset({4})
    of_groups.enter("a", TABLES, b"digest", handle=handle(0))
    assert (of_groups.take_freed(), engine.live) == ({A}, [])


def test_a_request_is_free_when_no_group_is_written_to(
    of_groups: LeaseBook, engine: Engine
) -> None:
    of_groups.enter("a", TABLES, b"digest", handle=handle(0))
    engine.refusal, engine.refused = LLMStatusCode.LLM_TIMEOUT, frozenset({3})
    of_groups.abort(handle(0))
    assert (of_groups.take_freed(), len(of_groups), len(engine.live)) == (set(), 1, 1)
    engine.refusal = None
    of_groups.expire()
    assert (of_groups.take_freed(), engine.live) == ({A}, [])


def test_groups_have_unlike_names(engine: Engine) -> None:
    for groups in ([], [GROUPS[0], GROUPS[0]]):
        with refused("LLM_PARAM_INVALID", "must be one or more groups with unique names"):
            LeaseBook(engine, groups, 5_000)


def test_who_says_it_again_before_it_was_entered_is_one_reader(book: LeaseBook) -> None:
    for _ in range(3):
        book.finish(None, b"digest", reader=7, readers=2, transfer="early")
    assert len(book._early[7]) == 1
    book.enter("b", [4], b"digest", "early", handle=handle(1))
    assert book.take_freed() == set()
    book.finish(None, b"digest", reader=8, readers=2, transfer="early")
    assert book.take_freed() == {B}


def test_what_is_pushed_ends_before_blocks_are_free(
    engine: Engine, clock: Callable[[float], float]
) -> None:
    ended: list[tuple[str, int]] = []
    book = LeaseBook(
        engine,
        CACHE,
        5_000,
        clock=lambda: clock(0),
        on_ending=lambda value: ended.append((value, len(engine.live))) is None,
    )
    book.enter("a", [3, 1], b"digest", "one", handle=handle(0))
    clock(6)
    book.expire()
    assert (ended, engine.live, book.take_freed()) == ([("one", 1)], [], {A})
