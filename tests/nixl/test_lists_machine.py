"""Lists of descriptors, compared with a Python list after each of many random calls."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import numpy as np
import pytest

from kvplan.nixl import nixl_agent
from kvplan.nixl._bindings import (
    nixl_mem_t,
    nixlNotFoundError,
    nixlRegDList,
    nixlRemoteDList,
    nixlXferDList,
)

NUMBERS = [0, 1, 7, 2**32, 2**64 - 1]
KINDS = list(nixl_mem_t.__members__.values())


def new_row(random: Random, kind: type) -> tuple[Any, ...]:
    numbers = tuple(random.choices(NUMBERS, k=3))
    text = random.choice(("", "a", "name"))
    if kind is nixlXferDList:
        return numbers
    return (*numbers, text.encode() if kind is nixlRegDList else text)


def given(row: tuple[Any, ...], random: Random) -> Any:
    """Return a row as a program may give it."""
    *numbers, text = row if len(row) == 4 else (*row, None)
    if text is not None and random.random() < 0.5:
        text = text.decode() if isinstance(text, bytes) else text.encode()
    found = [*numbers] if text is None else [*numbers, text]
    return random.choice((list, tuple))(found)


def walk(kind: Any, random: Random) -> None:
    memory = random.choice(KINDS)
    model = [new_row(random, kind) for _ in range(random.choice((0, 1, 3)))]
    made = kind(memory, [given(row, random) for row in model])
    for _ in range(60):
        place = random.randrange(len(model) + 2)
        match random.choice(("append", "append", "addDesc", "set", "remove", "find", "clear")):
            case "append" | "addDesc" as name:
                model.append(new_row(random, kind))
                getattr(made, name)(given(model[-1], random))
            case "set" if place < len(model):
                model[place] = new_row(random, kind)
                made[place] = given(model[place], random)
            case "remove" if place < len(model):
                del model[place]
                made.remDesc(place)
            case "find":
                wanted = new_row(random, kind)
                places = [i for i, row in enumerate(model) if row[:3] == wanted[:3]]
                if places:
                    assert made.index(wanted) == places[0]
                else:
                    with pytest.raises(nixlNotFoundError):
                        made.index(wanted)
            case "set" | "remove":
                for call in (made.remDesc, made.__getitem__):
                    with pytest.raises(IndexError):
                        call(place)
                with pytest.raises(IndexError):
                    made[place] = new_row(random, kind)
            case "clear" if random.random() < 0.1:
                model.clear()
                made.clear()
        assert (made.getType(), made.descCount(), made.isEmpty()) == (
            memory,
            len(model),
            not model,
        )
        assert [made[i] for i in range(len(model))] == model
        assert made.rows.tolist() == [[*row[:3]] for row in model]
        assert made.texts == [row[3] for row in model if len(row) == 4]
    same = kind(memory, model)
    assert made == same
    other = new_row(random, kind)
    same.append(other)
    assert made != same
    for i, row in enumerate(model):
        if row != other:
            changed = kind(memory, [*model[:i], other, *model[i + 1 :]])
            assert made != changed
    assert made != kind(KINDS[KINDS.index(memory) - 1], model)
    assert made != model
    if kind is not nixlRemoteDList:
        again = pickle.loads(pickle.dumps(made))
        assert (again, again.getType(), type(again)) == (made, memory, kind)
    if kind is nixlRegDList:
        trimmed = made.trim()
        assert trimmed == nixlXferDList(memory, [row[:3] for row in model])
        made.append(other)
        assert trimmed.descCount() == len(model)


@pytest.mark.parametrize("kind", [nixlXferDList, nixlRegDList, nixlRemoteDList])
def test_a_list_has_what_a_python_list_would_have(kind: Any) -> None:
    for seed in range(12):
        walk(kind, Random(seed))


@pytest.mark.parametrize("kind", [nixlXferDList, nixlRegDList, nixlRemoteDList])
@pytest.mark.parametrize("type_", [np.uint64, np.int64, ">u8"])
def test_a_list_of_an_array_is_a_copy_of_it(kind: Any, type_: Any) -> None:
    values = np.arange(6).reshape(2, 3).astype(type_)
    made = kind(nixl_mem_t.DRAM_SEG, values)
    values[:] = 9
    assert made.rows.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [len(made[i]) for i in range(2)] == [3 if kind is nixlXferDList else 4] * 2
    for wrong in (
        np.zeros((2, 4), np.uint64),
        np.zeros(3, np.uint64),
        np.zeros((1, 2, 3), np.uint64),
        np.zeros((2, 3), np.uint32),
        np.zeros((2, 3), np.float64),
    ):
        with pytest.raises(ValueError, match=r"an array of .* must"):
            kind(nixl_mem_t.DRAM_SEG, wrong)


def test_metadata_of_some_memory_has_no_address_unless_it_is_asked_for() -> None:
    agent, memory = nixl_agent("alone"), np.zeros(64, np.uint8)
    some = agent.register_memory([(memory.ctypes.data, 64, 0, "")], "DRAM")
    with_address, without = (agent.agent.getLocalPartialMD(some, asked) for asked in (True, False))
    assert agent.agent.getLocalPartialMD(some) == without != with_address
    address = str(agent.agent.engine.datadist.listen_address).encode()
    assert address
    assert (address in with_address, address in without) == (True, False)
    agent.agent.close()
