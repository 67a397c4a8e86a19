"""A peer that reads new bytes through an old registration sees that it has ended, on any machine.

A processor that reorders little does not show a missing fence. So the steps of generations.c run
here in every order that a weak processor allows: the later of two steps of a thread may come first,
unless a fence, an acquire, a release, or the same place in memory keeps their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations, permutations
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "kvnative/src/host/generations.c"
OLD, NEW = 1, 2  # generations, and the bytes written in them

_STEP = re.compile(
    r"(?P<fence>atomic_thread_fence\(\s*memory_order_seq_cst\s*\))"
    r"|(?P<exchange>atomic_compare_exchange_strong\()"
    r"|atomic_load_explicit\([^;]*?memory_order_(?P<load>\w+)\s*\)"
)


class Step(NamedTuple):
    kind: str  # read, write, fence
    place: str = ""
    order: str = ""  # acquire, release


def steps_of(function: str) -> list[Step]:
    """Return the accesses of a function of generations.c to the generations, in source order."""
    text = re.sub(r"/\*.*?\*/", "", SOURCE.read_text(), flags=re.DOTALL)
    body = re.search(rf"\b{function}\([^)]*\)\s*{{(.*?)^}}", text, re.DOTALL | re.MULTILINE)
    assert body is not None, f"{SOURCE} has no {function}"
    steps: list[Step] = []
    for found in _STEP.finditer(body[1]):
        if found["fence"]:
            steps.append(Step("fence"))
        elif found["exchange"]:
            steps += [Step("read", "board", "acquire"), Step("write", "board", "release")]
        else:
            steps.append(Step("read", "board", found["load"]))
    return steps


def may_swap(first: Step, second: Step) -> bool:
    """Return whether `second` may happen before `first`, which precedes it in the source."""
    if "fence" in (first.kind, second.kind) or first.place == second.place:
        return False
    return first.order != "acquire" and second.order != "release"


def orders(steps: list[Step]) -> Iterator[tuple[Step, ...]]:
    """Yield all orders in which the steps of a thread may happen."""
    for order in permutations(range(len(steps))):
        at = {step: when for when, step in enumerate(order)}
        pairs = combinations(range(len(steps)), 2)
        if all(at[a] < at[b] or may_swap(steps[a], steps[b]) for a, b in pairs):
            yield tuple(steps[index] for index in order)


def seen(owner: list[Step], peer: list[Step]) -> set[tuple[int, int]]:
    """Return all (bytes, generation) that the peer may read; the last of several looks counts."""
    found = set()
    for ours in set(orders(owner)):
        for theirs in set(orders(peer)):
            for slots in combinations(range(len(ours) + len(theirs)), len(ours)):
                memory = {"bytes": OLD, "board": OLD}
                read: dict[str, int] = {}
                left, right = iter(ours), iter(theirs)
                for moment in range(len(ours) + len(theirs)):
                    step = next(left) if moment in slots else next(right)
                    if step.kind == "write":
                        memory[step.place] = NEW
                    elif step.kind == "read" and moment not in slots:
                        read[step.place] = memory[step.place]
                found.add((read["bytes"], read["board"]))
    return found


RELEASED = [*steps_of("kvn_generations_release"), Step("write", "bytes")]
LOOKED = [Step("read", "bytes"), *steps_of("kvn_generations_first_stale")]


def test_no_order_shows_new_bytes_of_an_old_registration() -> None:
    assert seen(RELEASED, LOOKED) == {(OLD, OLD), (OLD, NEW), (NEW, NEW)}


@pytest.mark.parametrize("end", ["owner", "peer"])
def test_some_order_would_show_them_without_a_fence(end: str) -> None:
    """This shows that the tried orders suffice."""
    owner, peer = (
        [step for step in steps if step.kind != "fence" or end != dropped]
        for steps, dropped in ((RELEASED, "owner"), (LOOKED, "peer"))
    )
    assert (NEW, OLD) in seen(owner, peer)
