"""The producer's book: it grants leases, and decides when blocks are free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvplan import BlockLease, Cache, CacheDesc, DataType, LLMException, LLMStatusCode
from kvplan.serving import CacheGroup, LeaseBook, Table
from kvplan.serving.book import MAX_REMEMBERED, NotYetError
from kvplan.serving.tables import tables_of
from tests.serving.worker import handle
from tests.support.refusals import refused

A, B = handle(0), handle(1)
CACHE = Cache(CacheDesc(num_tensors=1, shape=(8, 4), data_type=DataType.DT_FLOAT), 1)


class Engine:
    """An engine that grants leases, and can refuse to."""

    def __init__(self) -> None:
        self.live: list[BlockLease] = []
        self.renewed: list[BlockLease] = []
        self.refusal: LLMStatusCode | None = None
        self.refused: frozenset[int] | None = None  # None: leases of all blocks

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
        if lease in self.live:  # an ended lease is not listed
            self.live.remove(lease)

    def _refuse(self, blocks: Sequence[int]) -> None:
        if self.refusal is not None and (self.refused is None or self.refused & {*blocks}):
            raise LLMException("as the test says", status_code=self.refusal)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def clock() -> Callable[[float], float]:
    """A clock: a call with seconds advances the time, a call with 0 returns it."""
    now = [100.0]

    def clock(seconds: float = 0) -> float:
        now[0] += seconds
        return now[0]

    return clock


@pytest.fixture
def book(engine: Engine, clock: Callable[[float], float]) -> Iterator[LeaseBook]:
    """A book of leases of 5 s, with request "a" of handle 0."""
    book = LeaseBook(engine, CACHE, 5_000, clock=lambda: clock(0))
    book.enter("a", [3, 1], b"digest", handle=handle(0))
    yield book
    assert len(book) == len(engine.live)


def test_a_lease_names_the_blocks_and_the_request(book: LeaseBook) -> None:
    found, ((lease, first_token),) = book.leases_of(handle(0), b"digest")
    assert (found, first_token) == (A, 0)
    assert (lease.blocks, lease.tag) == ((3, 1), "a")


def test_a_lease_is_granted_only_for_the_same_tokens(book: LeaseBook) -> None:
    with refused("LLM_KV_CACHE_NOT_EXIST", "request 00000000 has other tokens"):
        book.leases_of(handle(0), b"another")


def test_an_ask_for_an_unknown_handle_may_be_early(book: LeaseBook) -> None:
    with pytest.raises(NotYetError):
        book.leases_of(handle(1), b"digest")


def test_the_last_reader_frees_a_request(book: LeaseBook, engine: Engine) -> None:
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


def test_requests_that_are_not_renewed_expire(
    book: LeaseBook, clock: Callable[[float], float], engine: Engine
) -> None:
    book.enter("b", [3], b"digest", handle=handle(1))  # block 3 belongs to both requests
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


def test_blocks_that_a_peer_still_writes_are_not_free(book: LeaseBook, engine: Engine) -> None:
    engine.refusal = LLMStatusCode.LLM_TIMEOUT
    book.abort(handle(0))
    assert (book.take_freed(), len(book)) == (set(), 1)
    with refused("LLM_KV_CACHE_NOT_EXIST", "has ended"):
        book.leases_of(handle(0), b"digest")
    engine.refusal = None
    book.expire()
    assert book.take_freed() == {A}


def test_a_request_that_cannot_be_leased_is_free(book: LeaseBook, engine: Engine) -> None:
    engine.refusal = LLMStatusCode.LLM_OUT_OF_MEMORY
    book.enter("b", [4], b"digest", handle=handle(1))
    assert book.take_freed() == {B}
    with refused(
        "LLM_KV_CACHE_NOT_EXIST", "request 01000000 could not be leased: as the test says"
    ):
        book.leases_of(handle(1), b"digest")
    engine.refusal = None


@pytest.mark.parametrize(
    ("status", "is_logged"),
    [(LLMStatusCode.LLM_ENGINE_FINALIZED, False), (LLMStatusCode.LLM_FAILED, True)],
)
def test_a_lease_that_cannot_be_released_frees_its_request(
    book: LeaseBook,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    status: LLMStatusCode,
    is_logged: bool,
) -> None:
    """Only a timeout says that a peer still uses the blocks; another error is not the end."""
    engine.refusal = status
    book.abort(A)
    assert (book.take_freed(), len(book)) == ({A}, 0)
    assert caplog.messages == [f"request a: as the test says ({status.name})"] * is_logged
    engine.refusal = None
    engine.live.clear()
    book.enter("b", [4], b"digest", handle=B)
    assert book.leases_of(B, b"digest")[1][0].lease.blocks == (4,)


def test_the_end_of_the_oldest_transfers_is_forgotten(book: LeaseBook) -> None:
    """An ask for a forgotten one waits like that for an unknown one, until its timeout."""
    names = [f"t{number}" for number in range(MAX_REMEMBERED + 2)]
    for name in names:
        book.end_transfer(name, "was refused")
    for name in names[:2]:
        with pytest.raises(NotYetError):
            book.leases_of(None, b"digest", name)
    for name in (names[2], names[-1]):
        with refused("LLM_KV_CACHE_NOT_EXIST", "was refused"):
            book.leases_of(None, b"digest", name)


def test_a_long_name_is_cut_for_the_lease(book: LeaseBook) -> None:
    book.enter("x\a" * 100, [4], b"digest", handle=handle(1))
    assert book.leases_of(handle(1), b"digest")[1][0].lease.tag == "x?" * 32


PAGED = CacheDesc(
    num_tensors=1, shape=(8, 4, 2), data_type=DataType.DT_FLOAT, kv_tensor_format="block token dim"
)
GROUPS = [CacheGroup("window", Cache(PAGED, 1)), CacheGroup("full", Cache(PAGED, 2))]
TABLES = [Table([3], 2), Table([1, 4, 5])]


@pytest.fixture
def group_book(engine: Engine, clock: Callable[[float], float]) -> LeaseBook:
    """A book of two groups with blocks of 4 tokens."""
    return LeaseBook(engine, GROUPS, 5_000, clock=lambda: clock(0))


def test_a_request_has_a_lease_in_each_group(group_book: LeaseBook, engine: Engine) -> None:
    group_book.enter("a", TABLES, b"digest", handle=handle(0))
    _, leases = group_book.leases_of(handle(0), b"digest")
    assert [(lease.lease.blocks, lease.first_token) for lease in leases] == [
        ((3,), 8),
        ((1, 4, 5), 0),
    ]
    group_book.renew([handle(0)])
    assert [item.blocks for item in engine.renewed] == [(3,), (1, 4, 5)]
    group_book.finish(handle(0), b"digest", reader=7, readers=1)
    assert (group_book.take_freed(), engine.live) == ({A}, [])


def test_a_request_is_leased_in_all_groups_or_in_none(
    group_book: LeaseBook, engine: Engine
) -> None:
    engine.refusal, engine.refused = LLMStatusCode.LLM_OUT_OF_MEMORY, frozenset({4})
    group_book.enter("a", TABLES, b"digest", handle=handle(0))
    assert (group_book.take_freed(), engine.live) == ({A}, [])


def test_a_request_is_free_when_no_peer_writes_to_any_group(
    group_book: LeaseBook, engine: Engine
) -> None:
    group_book.enter("a", TABLES, b"digest", handle=handle(0))
    engine.refusal, engine.refused = LLMStatusCode.LLM_TIMEOUT, frozenset({3})
    group_book.abort(handle(0))
    assert (group_book.take_freed(), len(group_book), len(engine.live)) == (set(), 1, 1)
    engine.refusal = None
    group_book.expire()
    assert (group_book.take_freed(), engine.live) == ({A}, [])


def test_groups_need_unique_names(engine: Engine) -> None:
    for groups in ([], [GROUPS[0], GROUPS[0]]):
        with refused("LLM_PARAM_INVALID", "must be one or more groups with unique names"):
            LeaseBook(engine, groups, 5_000)


def test_repeated_early_readers_count_once(book: LeaseBook) -> None:
    for _ in range(3):
        book.finish(None, b"digest", reader=7, readers=2, transfer="early")
    assert len(book._early[7]) == 1
    book.enter("b", [4], b"digest", "early", handle=handle(1))
    assert book.take_freed() == set()
    book.finish(None, b"digest", reader=8, readers=2, transfer="early")
    assert book.take_freed() == {B}


def test_an_early_reader_of_a_handle_is_remembered(
    book: LeaseBook,
) -> None:
    """All workers use the handle of the scheduler, and some enter it later than others."""
    book.finish(handle(2), b"digest", reader=7, readers=1)
    book.finish(handle(3), b"another", reader=7, readers=1)
    assert (book.take_freed(), book.has_early) == (set(), True)
    book.enter("c", [4], b"digest", handle=handle(2))
    assert book.take_freed() == {handle(2)}
    book.enter("d", [5], b"digest", handle=handle(3))
    assert (book.take_freed(), book.has_early) == (set(), False)


def test_early_readers_are_forgotten_at_the_second_look_without_their_link(
    book: LeaseBook,
) -> None:
    """`Done` is sent only once.

    If a short break removed it, the blocks would wait until they expire.
    """
    book.finish(None, b"digest", reader=7, readers=1, transfer="a")
    for linked, remains in (([], True), ([7], True), ([], True), ([], False)):
        book.forget_readers(linked)
        assert book.has_early == remains


def test_pushes_end_before_blocks_are_free(engine: Engine, clock: Callable[[float], float]) -> None:
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


def test_blocks_of_a_wrong_type_leave_no_lease(engine: Engine) -> None:
    groups = [CacheGroup("window", CACHE), CacheGroup("full", CACHE)]
    book = LeaseBook(engine, groups, 5_000)
    wrong: Any = 5
    with pytest.raises(TypeError):
        book.enter("a", [Table([3], 2), Table(wrong)], b"digest", handle=A)
    assert (engine.live, len(book)) == ([], 0)


@pytest.mark.parametrize(
    ("skipped", "kind", "why"),
    [
        (-1, LLMException, r"skipped=-1 is out of range \[0, "),
        (2**63, LLMException, "skipped=9223372036854775808 is out of range"),
        (1.0, TypeError, r"skipped=1.0 must be int"),
    ],
)
def test_a_number_of_skipped_blocks_is_checked(
    skipped: Any, kind: type[Exception], why: str
) -> None:
    with pytest.raises(kind, match=why):
        tables_of([Table([3], skipped)], 1)


def test_a_finish_that_came_early_stays_known_if_the_blocks_have_a_wrong_type(
    engine: Engine,
) -> None:
    book, wrong = LeaseBook(engine, CACHE, 5_000), ["x"]
    book.finish(A, b"digest", 7, 1)
    with pytest.raises(TypeError):
        book.enter("a", Table(wrong), b"digest", handle=A)  # type: ignore[arg-type]
    book.enter("a", [3], b"digest", handle=A)
    assert (engine.live, book.take_freed()) == ([], {A})
