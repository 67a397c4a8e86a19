"""How a launch is given up: all interleavings of the host and of some blocks.

A model of what copy.cu and launch.c do with the two words, in a memory with store buffers. A
processor's stores wait in its buffer until it flushes them, at any time, and at its fences at the
latest: so a load may be before an earlier store of the same processor to another word, as it may on
GPUs and hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

BLOCKS, PIECES = 2, 2
BEGUN, STOP = 0, 1


class State(NamedTuple):
    """Of memory and of all actors: the host is the first, then blocks."""

    memory: tuple[int, int] = (0, 0)
    buffers: tuple[tuple[tuple[int, int], ...], ...] = ((),) * (1 + BLOCKS)
    steps: tuple[int, ...] = (0,) * (1 + BLOCKS)
    returned: bool = False  # abort has: nothing may be touched any more
    touched: int = 0  # pieces


def put(of: tuple, at: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*of[:at], value, *of[at + 1 :])


def load(state: State, actor: int, word: int) -> int:
    """Its own latest store, or memory."""
    own = [value for where, value in state.buffers[actor] if where == word]
    return own[-1] if own else state.memory[word]


def store(state: State, actor: int, word: int) -> State:
    waiting = (*state.buffers[actor], (word, 1))
    return state._replace(buffers=put(state.buffers, actor, waiting))


def go(state: State, actor: int, step: int | None = None) -> State:
    following = state.steps[actor] + 1 if step is None else step
    return state._replace(steps=put(state.steps, actor, following))


END = 99


def host(state: State, fences: bool) -> Iterator[State]:
    """Stores stop; fence; loads begun: 0 returns at once, otherwise it waits for all blocks."""
    step = state.steps[0]
    if step == 0:
        yield go(store(state, 0, STOP), 0)
    elif step == 1 and (not fences or not state.buffers[0]):
        yield go(state, 0)
    elif step == 2:
        if load(state, 0, BEGUN):
            yield go(state, 0)
        else:
            yield go(state, 0, END)._replace(returned=True)
    elif step == 3 and all(step == END for step in state.steps[1:]):
        yield go(state, 0, END)._replace(returned=True)


def block(state: State, actor: int, fences: bool) -> Iterator[State]:
    """Stores begun; fence; loads stop; a look and a piece in turn."""
    step = state.steps[actor]
    if step == 0:
        yield go(store(state, actor, BEGUN), actor)
    elif step == 1 and (not fences or not state.buffers[actor]):
        yield go(state, actor)
    elif step in range(2, 2 + 2 * PIECES, 2):
        yield go(state, actor, END) if load(state, actor, STOP) else go(state, actor)
    elif step in range(3, 3 + 2 * PIECES, 2):
        assert not state.returned, "a byte is touched after abort has returned"
        yield go(state, actor)._replace(touched=state.touched + 1)
    elif step == 2 + 2 * PIECES:
        yield go(state, actor, END)


def following(state: State, fences: bool) -> Iterator[State]:
    for actor, waiting in enumerate(state.buffers):
        if waiting:  # the oldest store reaches memory
            (word, value), *rest = waiting
            yield state._replace(
                memory=put(state.memory, word, value),
                buffers=put(state.buffers, actor, tuple(rest)),
            )
    yield from host(state, fences)
    for actor in range(1, 1 + BLOCKS):
        yield from block(state, actor, fences)


def explore(fences: bool) -> set[State]:
    """All states that can be reached."""
    seen = {State()}
    left = [State()]
    while left:
        for state in following(left.pop(), fences):
            if state not in seen:
                seen.add(state)
                left.append(state)
    return seen


def test_nothing_is_touched_after_abort_has_returned() -> None:
    states = explore(fences=True)
    ended = [state for state in states if all(step == END for step in state.steps)]
    assert {item.touched for item in ended} == set(range(BLOCKS * PIECES + 1))
    assert any(state.returned and 0 in state.steps for state in states), (
        "given up before all have begun"
    )
    stuck = [state for state in states if not any(following(state, True)) and state not in ended]
    assert stuck == []


def test_without_fences_it_would_be() -> None:
    with pytest.raises(AssertionError, match="after abort has returned"):
        explore(fences=False)
