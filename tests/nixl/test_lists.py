"""Lists of descriptors, and transfers of prepared lists."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvplan.nixl import _bindings as bindings
from kvplan.nixl.lists import DescList, nixlRegDList, nixlRemoteDList, nixlXferDList
from kvplan.nixl.values import nixl_mem_t
from tests.nixl.conftest import MakeHere, pattern
from tests.nixl.peer import MIB

KIB = 1 << 10


@pytest.mark.parametrize("kind", [nixlXferDList, nixlRegDList, nixlRemoteDList])
@pytest.mark.parametrize("wrong", [(1,), (1, 2), (1, 2, -3, "d"), (1.5, 2, 3, "d"), (1, 2, 3)])
def test_a_list_that_refuses_a_descriptor_is_unchanged(
    kind: type[DescList], wrong: tuple[Any, ...]
) -> None:
    """Its text would otherwise become that of the next descriptor."""
    rows: list[tuple[Any, ...]] = [(4096, 64, 3, "a"), (8192, 32, 3, "b"), (1, 2, 3, "c")]
    if kind.TEXT is None:
        rows, wrong = [row[:3] for row in rows], wrong[:2] if wrong == (1, 2, 3) else wrong[:3]
    descs = kind(nixl_mem_t.DRAM_SEG, rows[:2])
    changes: list[Callable[[], object]] = [
        lambda: descs.append(wrong),
        lambda: operator.setitem(descs, 0, wrong),
        lambda: operator.setitem(descs, 2, rows[2]),
        lambda: descs.remDesc(2),
    ]
    for change in changes:
        with pytest.raises((IndexError, RuntimeError)):
            change()
        assert descs == kind(nixl_mem_t.DRAM_SEG, rows[:2])
    descs.append(rows[2])
    assert descs == kind(nixl_mem_t.DRAM_SEG, rows)


@pytest.mark.parametrize("dtype", ["<u8", "<i8", ">u8"])
def test_a_list_of_an_array_is_a_copy(dtype: str) -> None:
    """A program fills one array repeatedly: its lists stay, and so does its array."""
    given = np.array([[4096, 64, 0], [8192, 32, 1]], dtype)
    made = bindings.nixlXferDList(bindings.DRAM_SEG, given)
    assert [made[0], made[1]] == [(4096, 64, 0), (8192, 32, 1)]
    made[0] = (1, 2, 3)
    assert given.tolist() == [[4096, 64, 0], [8192, 32, 1]]
    given[:] = 9
    assert [made[0], made[1]] == [(1, 2, 3), (8192, 32, 1)]


def test_a_row_without_its_text_changes_nothing_in_a_list() -> None:
    made = bindings.nixlRegDList(bindings.DRAM_SEG, [(4096, 64, 0, b"one")])
    with pytest.raises(IndexError):
        made[0] = (1, 2, 3)
    assert made[0] == (4096, 64, 0, b"one")


def test_a_list_that_changes_after_it_was_prepared_moves_what_was_prepared(
    make: MakeHere,
) -> None:
    here = make()
    agent, ours, theirs = here.agent, here.memory.ctypes.data, here.peer.address
    lists = [agent.get_xfer_descs([(at, KIB, 0)], "DRAM") for at in (ours, theirs)]
    sides = [
        agent.prep_xfer_dlist(who, each) for who, each in zip(("", "there"), lists, strict=True)
    ]
    lists[0][0], lists[1][0] = (ours + KIB, KIB, 0), (theirs + KIB, KIB, 0)
    handle = agent.make_prepped_xfer("READ", sides[0], [0], sides[1], [0])
    assert here.end(handle, agent.transfer(handle)) == "DONE"
    assert np.array_equal(here.memory[:KIB], pattern(0, KIB))
    assert (here.memory[KIB:] == 0xAB).all()


@pytest.mark.parametrize("place", [0, 1], ids=["local", "remote"])
@pytest.mark.parametrize("how", ["released", "dropped"])
def test_a_list_that_is_gone_makes_no_transfer(make: MakeHere, how: str, place: int) -> None:
    """Transfers that were made before still move their bytes."""
    here = make(KIB)
    agent, rows = here.agent, [(here.memory.ctypes.data, KIB, 0)]
    sides = [
        agent.prep_xfer_dlist("", rows, "DRAM"),
        agent.prep_xfer_dlist("there", [(here.peer.address, KIB, 0)], "DRAM"),
    ]
    numbers = [side._handle for side in sides]
    handle = agent.make_prepped_xfer("READ", sides[0], [0], sides[1], [0])
    if how == "released":
        agent.release_dlist_handle(sides[place])
    else:
        del sides[place]
    with pytest.raises(bindings.nixlInvalidParamError, match="a prepared list was released"):
        agent.agent.makeXferReq(bindings.NIXL_READ, numbers[0], [0], numbers[1], [0])
    assert here.end(handle, agent.transfer(handle)) == "DONE"
    assert np.array_equal(here.memory, pattern(0, KIB))


def test_only_a_local_and_a_remote_list_make_a_transfer(make: MakeHere) -> None:
    here = make(KIB)
    agent = here.agent
    mine = agent.prep_xfer_dlist("", [(here.memory.ctypes.data, KIB, 0)], "DRAM")
    theirs = agent.prep_xfer_dlist("there", [(here.peer.address, KIB, 0)], "DRAM")
    for local, remote in ((mine, mine), (theirs, theirs), (theirs, mine)):
        with pytest.raises(bindings.nixlInvalidParamError, match="must be a local list"):
            agent.make_prepped_xfer("READ", local, [0], remote, [0])


def test_the_texts_of_a_list_stay_with_their_rows() -> None:
    given = [(4096 * number, 64, 0, b"%d" % number) for number in range(1, 5)]
    made = bindings.nixlRegDList(bindings.DRAM_SEG, given)
    made.remDesc(1)
    made.append((1, 2, 3, b"last"))
    made.remDesc(0)
    assert [made[place] for place in range(made.descCount())] == [*given[2:], (1, 2, 3, b"last")]


def test_prepared_lists_of_100_000_descriptors(make: MakeHere) -> None:
    here = make(4 * MIB)
    count = 100_000
    rows = np.zeros((count, 3), np.uint64)
    rows[:, 0] = np.arange(count, dtype=np.uint64) * np.uint64(32)
    rows[:, 1] = 16
    mine, theirs = rows.copy(), rows.copy()
    mine[:, 0] += np.uint64(here.memory.ctypes.data)
    theirs[:, 0] += np.uint64(here.peer.address)
    agent = here.agent
    sides = agent.prep_xfer_dlist("", mine, "DRAM"), agent.prep_xfer_dlist("there", theirs, "DRAM")
    order = np.random.default_rng(1).permutation(count).astype(np.int32)
    handle = agent.make_prepped_xfer("READ", sides[0], order, sides[1], order)
    assert here.end(handle, agent.transfer(handle)) == "DONE"
    moved = here.memory[: count * 32].reshape(count, 32)
    assert np.array_equal(moved[:, :16], pattern(0, count * 32).reshape(count, 32)[:, :16])
    assert (moved[:, 16:] == 0xAB).all()
    assert agent.get_xfer_telemetry(handle).totalBytes == 16 * count
