"""The orders of docs/internals/memory-ordering.md, and the outcomes that they forbid on aarch64.

The programs are written by hand from the C sources in their names. Each runs unchanged, and without
each of the given orders: then the forbidden outcome must be possible, or the order is not needed.
Only reading shows that the sources have these orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.native.arm_model import (
    ACQUIRE,
    BOTH,
    ORDERED,
    PLAIN,
    RELEASE,
    Event,
    Fence,
    Outcome,
    Read,
    Swap,
    Write,
    outcomes,
)

Weaker = tuple[int, int, Event | None]
"""Thread, event, and its replacement; None: the event is removed."""


class Pattern(NamedTuple):
    """Threads that rely on an order, and the forbidden outcomes."""

    threads: tuple[tuple[Event, ...], ...]
    forbidden: Callable[[Outcome], bool]
    needed: tuple[Weaker, ...] = ()


PATTERNS = {
    # A writer announces itself, finds that the generation is still 1, and writes bytes.
    "host/writers.h: announced, or seen as released": Pattern(
        (
            (Swap("ticket", 0, 7, BOTH), Fence(), Read("generation", "found", ACQUIRE)),
            (Swap("generation", 1, 2, BOTH), Fence(), Read("ticket", "waits_for", ACQUIRE)),
            (Write("generation", 1),),
        ),
        lambda outcome: outcome["found"] == 1 and outcome["waits_for"] == 0,
        ((0, 1, None), (1, 1, None)),
    ),
    "host/writers.h: after the wait no thread writes": Pattern(
        (
            (Write("bytes", 1), Swap("ticket", 0, 7, RELEASE)),
            (Read("ticket", "left", ACQUIRE), Write("bytes", 2)),
        ),
        lambda outcome: outcome["left"] == 7 and outcome["bytes"] == 1,
        ((0, 1, Swap("ticket", 0, 7, PLAIN)), (1, 0, Read("ticket", "left", PLAIN))),
    ),
    # The first ticket, 0 here, exists before everything, and is 9 once it is removed.
    "host/writers.h: announced again, or seen as released": Pattern(
        (
            (
                Swap("second", 0, 7, BOTH),
                Fence(),
                Read("generation", "found", ACQUIRE),
                Write("first", 9, RELEASE, "found"),
            ),
            (
                Swap("generation", 0, 2, BOTH),
                Fence(),
                Read("second", "waits_for", ACQUIRE),
                Read("first", "and_for", ACQUIRE),
            ),
        ),
        lambda outcome: (
            outcome["found"] == 0 and outcome["waits_for"] == 0 and outcome["and_for"] == 9
        ),
        ((0, 1, None), (1, 1, None)),
    ),
    "host/generations.h: bytes of after the release are noticed": Pattern(
        (
            (Swap("generation", 0, 2, BOTH), Fence(), Write("bytes", 2)),
            (Read("bytes", "read"), Fence(), Read("generation", "found", ACQUIRE)),
        ),
        lambda outcome: outcome["read"] == 2 and outcome["found"] == 0,
        ((1, 1, None),),
    ),
    "host/generations.h: the first look comes before the bytes": Pattern(
        (
            (Write("bytes", 1), Swap("generation", 0, 1, BOTH)),
            (Read("generation", "found", ACQUIRE), Read("bytes", "read")),
        ),
        lambda outcome: outcome["found"] == 1 and outcome["read"] == 0,
        ((1, 0, Read("generation", "found", PLAIN)),),
    ),
    "host/generations.h: who knows a generation finds its deadline": Pattern(
        (
            (Write("deadline", 5, RELEASE), Swap("generation", 0, 1, BOTH)),
            (Read("generation", "known", ACQUIRE), Write("message", 1, RELEASE, "known")),
            (Read("message", "came", ACQUIRE), Read("deadline", "found", ACQUIRE)),
        ),
        lambda outcome: outcome["known"] == 1 and outcome["came"] == 1 and outcome["found"] == 0,
    ),
    "host/life.h: bytes of who came after the owner's end are noticed": Pattern(
        (
            (Swap("life", 0, 1, BOTH), Write("bytes", 2, RELEASE)),
            (Read("bytes", "read"), Fence(), Read("life", "ended", ACQUIRE)),
        ),
        lambda outcome: outcome["read"] == 2 and outcome["ended"] == 0,
        ((1, 1, None),),
    ),
    "core, tcp, device: a report is read once it is finished": Pattern(
        (
            (Write("report", 1), Write("finished", 1, RELEASE)),
            (Read("finished", "seen", ACQUIRE), Read("report", "read")),
        ),
        lambda outcome: outcome["seen"] == 1 and outcome["read"] == 0,
        (
            (0, 1, Write("finished", 1, PLAIN)),
            (1, 0, Read("finished", "seen", PLAIN)),
        ),
    ),
    # All four are sequentially consistent, without a fence.
    "tcp/table.h: in a call, or sees the removal": Pattern(
        (
            (Swap("epoch", 0, 1, BOTH), Read("removals", "seen", ORDERED)),
            (Swap("removals", 0, 1, BOTH), Read("epoch", "waits_for", ORDERED)),
        ),
        lambda outcome: outcome["seen"] == 0 and outcome["waits_for"] == 0,
        ((0, 1, Read("removals", "seen", PLAIN)), (1, 1, Read("epoch", "waits_for", PLAIN))),
    ),
    "tcp/table.h: after the wait no thread moves bytes": Pattern(
        (
            (Write("bytes", 1), Swap("epoch", 0, 2, BOTH)),
            (Read("epoch", "left", ORDERED), Write("bytes", 2)),
        ),
        lambda outcome: outcome["left"] == 2 and outcome["bytes"] == 1,
        ((0, 1, Swap("epoch", 0, 2, PLAIN)), (1, 0, Read("epoch", "left", PLAIN))),
    ),
    # UCX reads by plain loads if it has mapped the peer's memory.
    "ucx/transfer.c: announced, or seen as released": Pattern(
        (
            (Write("ticket", 7), Fence(), Read("generation", "found")),
            (Swap("generation", 0, 2, BOTH), Fence(), Read("ticket", "waits_for")),
        ),
        lambda outcome: outcome["found"] == 0 and outcome["waits_for"] == 0,
        ((0, 1, None), (1, 1, None)),
    ),
    "ucx/transfer.c: bytes of after the release are noticed": Pattern(
        (
            (Swap("generation", 0, 2, BOTH), Fence(), Write("bytes", 2)),
            (Read("bytes", "read"), Fence(), Read("generation", "found")),
        ),
        lambda outcome: outcome["read"] == 2 and outcome["found"] == 0,
        ((1, 1, None),),
    ),
    "ucx/transfer.c: after the ticket is gone no thread writes": Pattern(
        (
            (Write("bytes", 1), Write("ticket", 0, RELEASE), Write("gone", 1, RELEASE)),
            (Read("gone", "left", ACQUIRE), Write("bytes", 2)),
        ),
        lambda outcome: outcome["left"] == 1 and outcome["bytes"] == 1,
    ),
    "core/lower.h: written again when all readers are through": Pattern(
        (
            (Swap("leases", 0, 1, ORDERED), Read("column", "read"), Swap("leases", 1, 0, RELEASE)),
            (Swap("leases", 0, -1, ORDERED), Write("column", 9)),
        ),
        lambda outcome: outcome["read"] == 9,
        ((0, 2, Swap("leases", 1, 0, PLAIN)),),
    ),
}


def changed(pattern: Pattern, weaker: Weaker) -> list[list[Event]]:
    threads = [list(thread) for thread in pattern.threads]
    thread, event, instead = weaker
    threads[thread][event : event + 1] = [] if instead is None else [instead]
    return threads


@pytest.mark.parametrize("name", PATTERNS)
def test_forbidden_outcomes_do_not_happen(name: str) -> None:
    pattern = PATTERNS[name]
    found = outcomes(pattern.threads)
    assert found
    assert not [entry for entry in found if pattern.forbidden(entry)]


@pytest.mark.parametrize(
    ("name", "weaker"), [(name, item) for name in PATTERNS for item in PATTERNS[name].needed]
)
def test_each_order_is_needed(name: str, weaker: Weaker) -> None:
    pattern = PATTERNS[name]
    assert [outcome for outcome in outcomes(changed(pattern, weaker)) if pattern.forbidden(outcome)]


class TestTheModel:
    """The model compared with Arm's documents, for well-known programs."""

    def test_a_store_and_a_later_load_change_places(self) -> None:
        program = (
            (Write("x", 1), Read("y", "a")),
            (Write("y", 1), Read("x", "b")),
        )
        assert {"a": 0, "b": 0, "x": 1, "y": 1} in outcomes(program)

    @pytest.mark.parametrize(("order", "possible"), [(ORDERED, False), (ACQUIRE, True)])
    def test_a_release_and_a_later_acquire(self, order: str, possible: bool) -> None:
        program = (
            (Write("x", 1, RELEASE), Read("y", "a", order)),
            (Write("y", 1, RELEASE), Read("x", "b", order)),
        )
        assert any(outcome["a"] == outcome["b"] == 0 for outcome in outcomes(program)) == possible

    def test_all_see_stores_in_one_order(self) -> None:
        program = (
            (Write("x", 1),),
            (Write("y", 1),),
            (Read("x", "a", ACQUIRE), Read("y", "b")),
            (Read("y", "c", ACQUIRE), Read("x", "d")),
        )
        assert not [
            outcome
            for outcome in outcomes(program)
            if (outcome["a"], outcome["b"], outcome["c"], outcome["d"]) == (1, 0, 1, 0)
        ]

    def test_a_location_has_one_order(self) -> None:
        program = ((Write("x", 1),), (Read("x", "a"), Read("x", "b")))
        assert not [
            outcome for outcome in outcomes(program) if (outcome["a"], outcome["b"]) == (1, 0)
        ]

    def test_nothing_comes_between_the_halves_of_a_swap(self) -> None:
        program = ((Swap("x", 0, 1),), (Swap("x", 0, 2),))
        assert outcomes(program) == []  # both cannot succeed
