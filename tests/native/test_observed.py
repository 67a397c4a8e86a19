"""The log of an observed program's calls, and the block tables of its transfers' indices."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from kvnative._observed import CallLog, tables_of
from tests.support.held import allocated

Call = tuple[Any, ...]


def log_of(max_calls: int = 1 << 10, max_nbytes: int = 1 << 20) -> CallLog:
    log = CallLog(lambda: None, max_calls, max_nbytes)
    log.awake = True
    return log


def handled(log: CallLog, *values: object) -> None:
    for value in values:
        log.add_handle("note", log, 7, value, 0.0, (), "")


def made(log: CallLog, here: Any, there: Any) -> None:
    log.add_made("made", log, 7, "READ", 8, here, 9, there, b"cmpl-7")


def taken(log: CallLog, at_once: int = 64) -> list[Call]:
    found: list[Call] = []
    while len(log):
        calls, lost = log.take(at_once)
        assert not lost
        found += calls
    return found


class TestCalls:
    def test_each_kind_is_taken_as_it_was_added(self) -> None:
        log, owner, handle = log_of(), object(), object()
        began = perf_counter()
        log.add("note", owner, began, "", (1, "two"))
        log.add_handle("posted", owner, handle, "DONE", began, {"notif_msg": b""}, "")
        log.add_handle("failed", owner, 2**64 - 5, None, 0.0, (), "ValueError: x")
        indices = np.array([3, 1], np.int32)
        log.add_made("made", owner, 5, "READ", handle, indices, 6, (4, 2), b"cmpl-7")
        note, posted, failed, transfer = taken(log)
        ended = perf_counter()
        assert note[:3] == ("note", id(owner), began)
        assert began <= note[3] <= posted[3] <= failed[3] <= ended
        assert note[4:] == ("", 1, "two")
        assert posted[:3] == ("posted", id(owner), began)
        assert posted[4:] == ("", id(handle), "DONE", {"notif_msg": b""})
        assert failed[4:] == ("ValueError: x", 2**64 - 5, None, ())
        copy = np.array([3, 1], np.int64).tobytes()
        assert transfer == (
            "made", id(owner), 0.0, 0.0, "", 5, "READ", id(handle), copy, 6, (4, 2), b"cmpl-7",
        )  # fmt: skip

    @pytest.mark.parametrize("at_once", [1, 3, 100])
    def test_the_order_is_that_of_the_calls(self, at_once: int) -> None:
        """The order holds even for calls that arrive while others are taken."""
        log = log_of()
        handled(log, *range(10))
        found, _ = log.take(4)
        handled(log, *range(10, 15))
        found += taken(log, at_once)
        assert [call[6] for call in found] == [*range(15)]

    def test_calls_of_several_threads_keep_their_order(self) -> None:
        log = log_of(1 << 20, 1 << 30)

        def call(number: int) -> None:
            for index in range(2_000):
                made(log, np.full(3, number), [index])

        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        found: list[Call] = []
        while any(thread.is_alive() for thread in threads):
            found += log.take(64)[0]
        found += taken(log)
        assert len(found) == 8_000
        for number in range(4):
            mine = [call[10] for call in found if call[8] == np.full(3, number).tobytes()]
            assert mine == [[index] for index in range(2_000)]

    def test_the_reader_is_woken_once(self) -> None:
        woken: list[int] = []
        log = CallLog(lambda: woken.append(len(log)), 8, 1 << 20)
        handled(log, 1)
        made(log, [1], [2])
        log.add("note", log, 0.0, "", ())
        log.awake = True
        handled(log, 1)
        log.active = log.awake = False
        handled(log, 1)
        assert woken == [1, 2, 3]
        assert len(log) == 4

    @pytest.mark.parametrize("count", [0, 6, 8])
    def test_a_wrong_number_of_arguments_is_refused(self, count: int) -> None:
        log: Any = log_of()
        with pytest.raises(TypeError, match=f"takes 7 arguments, got {count}"):
            log.add_handle(*[None] * count)
        with pytest.raises(TypeError, match=f"takes 9 arguments, got {count}"):
            log.add_made(*[None] * count)

    def test_taken_calls_are_not_held(self) -> None:
        log, values = log_of(), [object() for _ in range(6)]
        before = [sys.getrefcount(value) for value in values]
        for _ in range(3):
            log.add_handle(values[0], None, 7, values[1], 0.0, values[2], "")
            log.add_made(values[3], None, 7, values[4], 8, [values[5]], 9, [1], b"")
            log.add(values[0], None, 0.0, "", (values[1],))
            log.take(1)
        log.clear()
        assert len(log) == 0
        handled(log, values[0])
        del log
        gc.collect()
        assert [sys.getrefcount(value) for value in values] == before

    @pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer has its own malloc")
    def test_a_finalizer_that_calls_while_calls_are_dropped_costs_no_memory(self) -> None:
        log = log_of(1 << 20)

        def fill_and_clear() -> int:
            handled(log, Calling(log), *range(10_000))
            filled = allocated()
            log.clear()
            assert len(log) == 1
            log.clear()
            return filled

        fill_and_clear()
        before = allocated()
        one = fill_and_clear() - before
        for _ in range(10):
            fill_and_clear()
        assert allocated() - before < one


class Calling:
    """An object whose finalizer calls a method that is observed."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def __del__(self) -> None:
        handled(self.log, "from a finalizer")


INDICES: dict[str, Any] = {
    "int32": np.array([5, -1, 2**31 - 1], np.int32),
    "int64": np.array([5, -1, 2**62]),
    "none": np.array([], np.int32),
    "one of a strided array": np.arange(6, dtype=np.int32)[1:2],
    "read-only": np.frombuffer(np.arange(3).tobytes(), np.int64),
    "strided": np.arange(6, dtype=np.int32)[::2],
    "big-endian": np.array([5, 1], ">i4"),
    "uint32": np.array([5, 2**32 - 1], np.uint32),
    "int8": np.array([5, -1], np.int8),
    "objects": np.array([5, 2**40], object),
    "list": [3, 1, 2],
    "tuple": (3, 1),
    "range": range(4),
}


class TestIndices:
    @pytest.mark.parametrize("kind", INDICES)
    def test_indices_are_those_of_the_call(self, kind: str) -> None:
        log, given = log_of(), INDICES[kind]
        given = given.copy() if isinstance(given, list | np.ndarray) else given
        expected = [*map(int, given)]
        made(log, given, [1])
        made(log, [2], given)
        if isinstance(given, list | np.ndarray):
            given[:] = given[::-1]
        first, second = taken(log, 1)
        assert (first[10], second[8]) == ([1], [2])
        for found in (first[8], second[10]):
            numbers = np.frombuffer(found, np.int64) if isinstance(found, bytes) else found
            assert [*map(int, numbers)] == expected

    def test_wrong_types_are_refused(self) -> None:
        log, before = log_of(), np.arange(3)
        for _ in range(3):
            with pytest.raises(TypeError):
                made(log, before, 5)
            with pytest.raises(TypeError):
                made(log, np.array(5), before)
        assert len(log) == 0
        before.resize(4, refcheck=False)  # its buffer is not held


class TestBounds:
    def test_calls_that_have_no_room_are_counted(self) -> None:
        """Calls of other methods have twice the room. Lost calls are reported after the others."""
        log = log_of(max_calls=4)
        handled(log, *range(7))
        for number in range(6):
            log.add("any", log, 0.0, "", (number,))
        first, lost = log.take(7)
        assert lost == 0
        last, lost = log.take(7)
        assert [call[0] for call in first + last] == [*["note"] * 4, *["any"] * 4]
        assert lost == 3 + 2
        handled(log, 1)
        assert [call[6] for call in taken(log)] == [1]

    def test_bytes_of_indices(self) -> None:
        log = log_of(max_nbytes=100)
        made(log, np.arange(10), [1, 2])  # 96
        made(log, np.arange(10), [])
        handled(log, 1)
        calls, lost = log.take(100)
        assert (len(calls), lost) == (1, 2)
        made(log, np.arange(10), [1, 2])
        assert len(log) == 1

    def test_one_transfer_always_has_room(self) -> None:
        log = log_of(max_nbytes=100)
        made(log, np.arange(1 << 20), np.arange(1 << 20, dtype=np.int32))
        ((*_, here, _, there, _),) = taken(log)
        assert here == there == np.arange(1 << 20).tobytes()

    def test_batches_reuse_memory(self) -> None:
        """Batches of any length reuse the memory of earlier ones."""
        numbers, log = random.Random(3), log_of(1 << 20, 1 << 30)
        for _ in range(40):
            expected = []
            for _ in range(numbers.randrange(200)):
                here = [numbers.randrange(1 << 31) for _ in range(numbers.randrange(50))]
                made(log, np.array(here, numbers.choice([np.int32, np.int64])), here)
                expected.append((np.array(here, np.int64).tobytes(), here))
            assert [(call[8], call[10]) for call in taken(log, 7)] == expected


def by_numpy(here: list[int], there: list[int], *lists: int) -> object:
    """Compute the result of `tables_of` by names of tensors and rows."""
    for num in range(len(here), 0, -1):
        if len(here) % num:
            continue
        found: list[object] = [num]
        for indices, (tensors, rows) in ((here, lists[:2]), (there, lists[2:])):
            names = [divmod(index, rows) for index in indices]
            table = [row for _, row in names[: len(indices) // num]]
            first = names[0][0]
            if names == [(first + t, row) for t in range(num) for row in table] and (
                0 <= first <= tensors - num
            ):
                found += [first, np.array(table, np.int64).tobytes(), len({*table}) == len(table)]
        if len(found) == 7:
            return tuple(found)
    return None


def test_tables_of_random_indices() -> None:
    numbers = random.Random(5)
    outcomes = set()
    for _ in range(20_000):
        lists = [numbers.randrange(1, 5) for _ in range(4)]
        num, rows = numbers.randrange(1, 4), numbers.randrange(1, 4)
        pair = []
        for count in lists[1::2]:
            first, table = numbers.randrange(2), [numbers.randrange(count) for _ in range(rows)]
            indices = [(first + t) * count + row for t in range(num) for row in table]
            if numbers.random() < 0.1:
                indices[numbers.randrange(len(indices))] += numbers.choice([-1, 1, -50, 50])
            pair.append(indices)
        copies = [np.array(indices, np.int64).tobytes() for indices in pair]
        found = tables_of(*copies, *lists)
        assert found == by_numpy(*pair, *lists), (pair, lists)
        outcomes.add(found if found is None else (found[0], found[3]))
    assert None in outcomes
    assert {(num, distinct) for num in (1, 2, 3) for distinct in (True, False)} <= outcomes


def test_tables_of_nothing_or_of_unequal_lengths() -> None:
    one = np.array([1]).tobytes()
    assert tables_of(b"", b"", 1, 4, 1, 4) is None
    assert tables_of(one, one * 2, 1, 4, 1, 4) is None
    assert tables_of(one, one, 1, 4, 1, 4) == (1, 0, one, True, 0, one, True)
