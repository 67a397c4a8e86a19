"""The producer's book compared with a model: holders of blocks, leases, and remembered readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from kvplan import BlockLease, Cache, LLMException, LLMStatusCode
from kvplan.serving import CacheGroup, Handle, LeaseBook, Table
from kvplan.serving.book import NotYetError
from tests.support.refusals import refused

from .test_book import CACHE, handle

TTL_S = 5.0
HANDLES, NAMES, DIGESTS, READERS = range(4), ("x", "y"), (b"one", b"other"), range(1, 4)
REFUSED = LLMException("as the test says", status_code=LLMStatusCode.LLM_PARAM_INVALID)


@dataclass(eq=False)
class Request:
    """A request that was entered."""

    handle: Handle
    name: str
    digest: bytes
    deadline: float
    leased: bool = True
    state: str = "held"  # or "ending" (a peer delays it), or "freed"
    done: set[int] = field(default_factory=set)


class Engine:
    """Leases of two groups of caches. The first block is the number of the request's handle."""

    def __init__(self) -> None:
        self.live: set[tuple[int, int]] = set()  # number of the request, and group
        self.refuses = -1  # the group whose lease fails
        self.expired: set[int] = set()  # numbers whose leases cannot be renewed
        self.busy: set[int] = set()  # numbers whose blocks a peer still uses
        self.renewed: list[tuple[int, int]] = []

    def lease_blocks(
        self, cache: Cache, blocks: Sequence[int], *, tag: str = "", ttl_ms: float | None = None
    ) -> BlockLease:
        group = cache.cache_id
        if group == self.refuses:
            raise REFUSED
        self.live.add((blocks[0], group))
        return BlockLease(1, bytes(16), group, blocks[0], tuple(blocks), True, tag, ())

    def renew(self, lease: BlockLease, ttl_ms: float) -> None:
        assert ttl_ms == TTL_S * 1000
        if lease.lease_id in self.expired:
            raise REFUSED
        self.renewed.append((lease.lease_id, lease.cache_id))

    def release(self, lease: BlockLease) -> None:
        if lease.lease_id in self.busy:
            raise LLMException("busy", status_code=LLMStatusCode.LLM_TIMEOUT)
        self.live.discard((lease.lease_id, lease.cache_id))


class Book:
    """The book, its model, and calls of both with random arguments."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 100.0
        self.engine = Engine()
        self.pushed: set[str] = set()  # transfers whose blocks a push still reads
        self.woken = 0
        caches = [CACHE, Cache(CACHE.cache_desc, 2)]
        self.book = LeaseBook(
            self.engine,
            [CacheGroup(f"g{each.cache_id}", each, 4) for each in caches],
            TTL_S * 1000,
            clock=lambda: self.now,
            on_freed=self.wake,
            on_ending=lambda name: name not in self.pushed,
        )
        self.requests: dict[int, Request] = {}
        self.named: dict[str, Request] = {}
        self.ended: set[str] = set()  # names
        self.early: dict[tuple[int, int | str], tuple[bytes, int]] = {}
        self.absent: set[int] = set()  # readers at the last look, and silent since
        self.freed: set[Handle] = set()
        self.expired = 0

    def wake(self) -> None:
        assert self.book.has_freed
        self.woken += 1

    # The model.

    def model_end(self, number: int) -> None:
        """End the request; its blocks are free unless a peer uses them."""
        request = self.requests[number]
        if request.state == "held":
            request.state = "ending"
            if self.named.get(request.name) is request:
                self.model_end_name(request.name)
        if request.state == "ending" and not (
            request.name in self.pushed or (request.leased and number in self.engine.busy)
        ):
            request.state = "freed"
            self.freed.add(request.handle)

    def model_end_name(self, name: str) -> None:
        self.named.pop(name, None)
        self.ended.add(name)
        self.model_take_early(name)

    def model_take_early(self, key_part: int | str) -> dict[int, tuple[bytes, int]]:
        keys = [key for key in self.early if key[1] == key_part]
        return {key[0]: self.early.pop(key) for key in keys}

    def model_finish(self, request: Request, digest: bytes, reader: int, readers: int) -> None:
        if request.state == "held" and request.digest == digest:
            request.done.add(reader)
            if len(request.done) >= readers:
                self.model_end(self.number_of(request))

    def number_of(self, request: Request) -> int:
        return next(number for number, candidate in self.requests.items() if candidate is request)

    def in_state(self, state: str) -> list[int]:
        return [number for number, candidate in self.requests.items() if candidate.state == state]

    # The events.

    def enter(self) -> None:
        number, digest = self.random.choice(HANDLES), self.random.choice(DIGESTS)
        name, refuses = self.random.choice(("", *NAMES)), self.random.choice((-1, -1, -1, 1, 2))
        arguments = f"r{number}", [Table([number]), Table([number, 7])], digest, name
        if number in self.requests:
            with refused("LLM_PARAM_INVALID", f"handle={handle(number)} was used before"):
                self.book.enter(*arguments, handle=handle(number))
            return
        self.engine.refuses = refuses
        self.engine.busy.discard(number)  # a peer has no lease that was never granted
        assert self.book.enter(*arguments, handle=handle(number)) == handle(number)
        self.engine.refuses = -1
        request = Request(handle(number), name, digest, self.now + TTL_S, refuses < 0)
        self.requests[number] = request
        early = self.model_take_early(number)
        if not request.leased:
            request.state = "ending"
            if name not in ("", *self.named):  # otherwise another request has and keeps the name
                self.model_end_name(name)
            self.model_end(number)
        elif name and name not in self.named:
            self.named[name] = request
            self.ended.discard(name)
            early |= self.model_take_early(name)
        for reader, (found_request, readers) in early.items():
            self.model_finish(request, found_request, reader, readers)

    def finish(self) -> None:
        key_part: int | str = self.random.choice((*HANDLES, *NAMES))
        digest, reader = self.random.choice(DIGESTS), self.random.choice(READERS)
        readers = self.random.choice((1, 2))
        if isinstance(key_part, int):
            self.book.finish(handle(key_part), digest, reader, readers)
            request = self.requests.get(key_part)
            if request is None:
                self.early[reader, key_part] = digest, readers
        else:
            self.book.finish(None, digest, reader, readers, key_part)
            request = self.named.get(key_part)
            if request is None and key_part not in self.ended:
                self.early[reader, key_part] = digest, readers
        self.absent.discard(reader)
        if request is not None:
            self.model_finish(request, digest, reader, readers)

    def renew(self) -> None:
        numbers = self.random.sample(HANDLES, len(HANDLES))
        late = self.random.choice((-1, *HANDLES))
        self.engine.expired, self.engine.renewed = {late}, []
        self.book.renew(map(handle, numbers))
        expected = []
        for number in numbers:
            request = self.requests.get(number)
            if request is not None and request.state == "held" and number != late:
                request.deadline = self.now + TTL_S
                expected += [(number, 1), (number, 2)]
        assert self.engine.renewed == expected

    def expire(self) -> None:
        self.now += self.random.choice((0.0, 0.0, 2.0, TTL_S))
        late = [
            n
            for n, candidate in self.requests.items()
            if candidate.state == "held" and candidate.deadline <= self.now
        ]
        ending = [n for n, candidate in self.requests.items() if candidate.state == "ending"]
        self.book.expire()
        self.expired += len(late)
        for number in ending + late:
            self.model_end(number)

    def abort(self) -> None:
        number = self.random.choice(HANDLES)
        self.book.abort(handle(number))
        if number in self.requests:
            self.model_end(number)

    def refuse(self) -> None:
        name = self.random.choice(NAMES)
        self.book.end_transfer(name, "was refused")
        self.model_end_name(name)

    def peers_use(self) -> None:
        """Let pushes read the blocks of some transfers from now on, and peers those of leases."""
        self.pushed = {name for name in NAMES if self.random.random() < 0.4}
        self.engine.busy = {number for number in HANDLES if self.random.random() < 0.4}

    def push_ends(self) -> None:
        name = self.random.choice(NAMES)
        self.pushed.discard(name)
        self.book.end_again(name)
        for number, request in self.requests.items():
            if request.name == name and request.state == "ending":
                self.model_end(number)

    def some_are_linked(self) -> None:
        linked = {reader for reader in READERS if self.random.random() < 0.6}
        self.book.forget_readers(linked)
        absent = {reader for reader, _ in self.early} - linked
        removed, self.absent = absent & self.absent, absent
        self.early = {key: value for key, value in self.early.items() if key[0] not in removed}

    def take(self) -> None:
        assert self.book.take_freed() == self.freed
        self.freed = set()

    def check(self) -> None:
        assert len(self.book) == len(self.requests) - len(self.in_state("freed"))
        assert self.book.has_freed == bool(self.freed)
        assert self.book.has_early == bool(self.early)
        assert self.book.expired == self.expired
        assert self.woken == sum(candidate.state == "freed" for candidate in self.requests.values())
        numbers = {
            number
            for number, candidate in self.requests.items()
            if candidate.leased and candidate.state == "held"
        }
        assert self.engine.live >= {(number, group) for number in numbers for group in (1, 2)}
        removed = {
            number for number, candidate in self.requests.items() if candidate.state == "freed"
        }
        assert not any(number in removed for number, _ in self.engine.live)
        for number in HANDLES:
            self.check_lease(handle(number), "", self.requests.get(number), number in self.requests)
        for name in NAMES:
            self.check_lease(None, name, self.named.get(name), name in self.ended)

    def check_lease(
        self, asked: Handle | None, name: str, request: Request | None, known: bool
    ) -> None:
        stands = request is not None and request.state == "held"
        for digest in DIGESTS:
            if request is not None and stands and request.digest == digest:
                found, leases = self.book.leases_of(asked, digest, name)
                assert found == request.handle
                assert [candidate.lease.cache_id for candidate in leases] == [1, 2]
            elif stands:
                with refused("LLM_KV_CACHE_NOT_EXIST", "has other tokens"):
                    self.book.leases_of(asked, digest, name)
            elif known:
                with refused("LLM_KV_CACHE_NOT_EXIST", str(name or asked)):
                    self.book.leases_of(asked, digest, name)
            else:
                with pytest.raises(NotYetError):
                    self.book.leases_of(asked, digest, name)


MOVES = (
    Book.enter, Book.enter, Book.finish, Book.renew, Book.expire, Book.abort, Book.refuse,
    Book.peers_use, Book.push_ends, Book.some_are_linked, Book.take,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_requests_are_held_and_freed_like_those_of_the_model(seed: int) -> None:
    for walk in range(25):
        random = Random(f"{seed} {walk}")
        book = Book(random)
        for step in range(40):
            move = random.choice(MOVES)
            move(book)
            try:
                book.check()
            except AssertionError as error:
                error.add_note(f"step {step} of walk {walk}, {move.__name__}")
                raise
