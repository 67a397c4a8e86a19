"""The axiomatic memory model of aarch64, for a few threads, with all executions.

A program is a row of events for each thread, few enough to try all executions. Arm's manual (B2.3,
"external visibility") allows an execution under three conditions. Program order agrees with the
reads and writes of each location (coherence). No store comes between the halves of a
read-modify-write. No event is observed before itself (`ob` has no cycle). Copied bytes are one
location.

Read-modify-writes are those of Armv8.0 (LDAXR and STLXR), which guarantee less than Armv8.1's.
Dependencies, which would forbid more, are left out except one: a write with `if_read` is not made
before the outcome of that read is certain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations, product
from typing import NamedTuple

PLAIN, ACQUIRE, ORDERED, RELEASE, BOTH = "", "Q", "A", "L", "AL"
"""Orders as in C. ACQUIRE may be LDAPR, which does not wait for earlier releases; ORDERED is LDAR,
a sequentially consistent load. RELEASE is the store of both kinds; BOTH is for swaps."""


class Read(NamedTuple):
    """A load, whose result has the name `into`."""

    location: str
    into: str
    order: str = PLAIN


class Write(NamedTuple):
    """A store, which is made only after the outcomes of the reads in `if_read` are certain."""

    location: str
    value: int
    order: str = PLAIN
    if_read: str = ""


class Swap(NamedTuple):
    """A read-modify-write that succeeds: it reads `old`, and writes `new`."""

    location: str
    old: int
    new: int
    order: str = PLAIN


class Fence(NamedTuple):
    """DMB ISH."""


Event = Read | Write | Swap | Fence
Program = Sequence[Sequence[Event]]
Outcome = Mapping[str, int]
"""The results of reads by name, and the last value of each location by its name."""


class _Op(NamedTuple):
    """A load or a store, one half of a swap, or a fence."""

    number: int
    thread: int
    kind: str  # R, W, F
    location: str = ""
    order: str = PLAIN
    value: int | None = None  # the stored value, or the value that a load must read
    into: str = ""
    partner: int = -1  # for the store of a swap: its load
    if_read: str = ""


def outcomes(program: Program) -> list[Outcome]:
    """Return all outcomes that the model allows. Each location holds 0 at first."""
    ops = list(_ops(program))
    found = []
    for read_from, ranks in _candidates(ops):
        if _is_allowed(ops, read_from, ranks):
            values: dict[str, int] = {}
            for read, write in read_from.items():
                values[ops[read].into or f"#{read}"] = _value(ops, write)
            for rank in ranks.values():
                values[ops[rank[-1]].location] = _value(ops, rank[-1])
            found.append(values)
    return found


def _ops(program: Program) -> Iterator[_Op]:
    number = 0
    for thread, events in enumerate(program):
        for event in events:
            match event:
                case Read(location, into, order):
                    yield _Op(number, thread, "R", location, order, into=into)
                case Write(location, value, order, if_read):
                    yield _Op(number, thread, "W", location, order, value, if_read=if_read)
                case Fence():
                    yield _Op(number, thread, "F")
                case Swap(location, old, new, order):
                    yield _Op(number, thread, "R", location, order.replace("L", ""), old)
                    number += 1
                    yield _Op(
                        number, thread, "W", location, order.replace("A", ""), new, "", number - 1
                    )
            number += 1


def _value(ops: Sequence[_Op], write: int) -> int:
    return 0 if write < 0 else ops[write].value or 0


def _candidates(
    ops: Sequence[_Op],
) -> Iterator[tuple[dict[int, int], dict[str, tuple[int, ...]]]]:
    """Yield the store (-1: none) that each load reads, with an order of each location's stores."""
    reads = [op for op in ops if op.kind == "R"]
    stores: dict[str, list[int]] = {}
    for op in ops:
        if op.kind == "W":
            stores.setdefault(op.location, []).append(op.number)
    sources = [
        [
            write
            for write in (-1, *stores.get(read.location, []))
            if read.value is None or _value(ops, write) == read.value
        ]
        for read in reads
    ]
    for chosen in product(*sources):
        read_from = dict(zip((read.number for read in reads), chosen, strict=True))
        for orders in product(*(permutations(store) for store in stores.values())):
            yield read_from, dict(zip(stores, orders, strict=True))


def _is_allowed(
    ops: Sequence[_Op], read_from: Mapping[int, int], ranks: Mapping[str, tuple[int, ...]]
) -> bool:
    before = {(a, b) for row in ranks.values() for a, b in combinations(row, 2)}  # coherence
    after_read = set()  # a store after the one that was read
    for read, write in read_from.items():
        row = ranks.get(ops[read].location, ())
        later = row if write < 0 else row[row.index(write) + 1 :]
        after_read |= {(read, item) for item in later}
    was_read = {(write, read) for read, write in read_from.items() if write >= 0}
    same = {
        (a.number, b.number)
        for a, b in _in_program_order(ops)
        if a.location == b.location and "F" not in (a.kind, b.kind)
    }
    if _has_cycle(len(ops), same | before | after_read | was_read):
        return False
    for op in ops:  # no store between the halves of a swap
        if op.partner >= 0 and any(
            (op.partner, other) in after_read and (other, op.number) in before
            for other in ranks[op.location]
        ):
            return False
    external = {(a, b) for a, b in before | after_read | was_read if ops[a].thread != ops[b].thread}
    return not _has_cycle(len(ops), external | set(_ordered(ops)))


def _in_program_order(ops: Sequence[_Op]) -> Iterator[tuple[_Op, _Op]]:
    return ((a, b) for a, b in combinations(ops, 2) if a.thread == b.thread)


def _ordered(ops: Sequence[_Op]) -> Iterator[tuple[int, int]]:
    """Return the pairs that are ordered within a thread."""
    for a, b in _in_program_order(ops):
        between = ops[a.number + 1 : b.number]
        is_fence = any(item.kind == "F" for item in between)
        is_acquire = a.kind == "R" and a.order in (ACQUIRE, ORDERED)
        is_release = b.kind == "W" and b.order == RELEASE
        both = a.kind == "W" and a.order == RELEASE and b.kind == "R" and b.order == ORDERED
        swap = b.partner == a.number
        decided = bool(b.if_read) and a.into == b.if_read
        if is_fence or is_acquire or is_release or both or swap or decided:
            yield a.number, b.number


def _has_cycle(count: int, edges: set[tuple[int, int]]) -> bool:
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        after[a].append(b)
    state = [0] * count

    def visit(at: int) -> bool:
        state[at] = 1
        for item in after[at]:
            if state[item] == 1 or (state[item] == 0 and visit(item)):
                return True
        state[at] = 2
        return False

    return any(state[number] == 0 and visit(number) for number in range(count))
