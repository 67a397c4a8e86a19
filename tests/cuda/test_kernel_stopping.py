"""Cancellation of a launch: all interleavings of the host and of some blocks.

The model has the two words of copy.cu and launch.c, in a memory with store buffers. A processor's
stores wait in its buffer until the processor flushes them, at any time, but at its fences at the
latest. So a load may precede an earlier store of the same processor to another word, as on GPUs and
hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

BLOCKS, PIECES = 2, 2
BEGUN, STOP = 0, 1


class State(NamedTuple):
    """The state of memory and of all actors: the host first, then blocks."""

    memory: tuple[int, int] = (0, 0)
    buffers: tuple[tuple[tuple[int, int], ...], ...] = ((),) * (1 + BLOCKS)
    steps: tuple[int, ...] = (0,) * (1 + BLOCKS)
    returned: bool = False  # True once abort has returned; then no block may touch memory
    touched: int = 0  # number of pieces


def put(of: tuple, at: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*of[:at], value, *of[at + 1 :])


def load(state: State, actor: int, word: int) -> int:
    """Return the actor's own latest store, or the value in memory."""
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
    """Model the host: store "stop", fence, load "begun".

    It returns at once for 0, else after all blocks.
    """
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
    """Model a block: store "begun", fence, then load "stop" before each piece."""
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
    """Return all states that can be reached."""
    seen = {State()}
    left = [State()]
    while left:
        for state in following(left.pop(), fences):
            if state not in seen:
                seen.add(state)
                left.append(state)
    return seen


def test_no_memory_is_touched_after_abort_has_returned() -> None:
    states = explore(fences=True)
    ended = [state for state in states if all(step == END for step in state.steps)]
    assert {item.touched for item in ended} == set(range(BLOCKS * PIECES + 1))
    assert any(state.returned and 0 in state.steps for state in states), (
        "given up before all have begun"
    )
    stuck = [state for state in states if not any(following(state, True)) and state not in ended]
    assert stuck == []


def test_memory_could_be_touched_without_fences() -> None:
    with pytest.raises(AssertionError, match="after abort has returned"):
        explore(fences=False)
