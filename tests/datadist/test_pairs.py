"""Requests of known pairs have the same effects and errors as requests whose names are resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    Coalesce,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    LlmRole,
    Rows,
    Transfer,
)
from kvplan.engine.pairs import find_request
from kvplan.execution.transfers import SMALL_NBYTES
from kvplan.testing import observe_plans
from tests.datadist.conftest import link

pytestmark = pytest.mark.skipif(SMALL_NBYTES == 0, reason="without a GIL nothing moves at once")

PAGED = CacheDesc(4, (8, 16), DataType.DT_INT32)
SLOTS = CacheDesc(4, (4, 64), DataType.DT_INT32)
LAID = CacheDesc(4, (8, 4, 2, 2), DataType.DT_INT32, kv_tensor_format="block token head dim")
KEY = BlocksCacheKey(1, 5)


class Ends(NamedTuple):
    """Two engines of this process, the names that the second may use, and all tensors of both."""

    user: LlmDataDist
    there: list[Any]
    here: list[Any]
    arrays: list[NDArray[Any]]


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    with LlmDataDist(1, LlmRole.PROMPT) as owner, LlmDataDist(2, LlmRole.DECODER) as user:
        owner.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
        user.initialize()
        link(user, owner)
        paged = owner.allocate_blocks_cache(PAGED, BlocksCacheKey(0, 5))
        slots = owner.allocate_cache(SLOTS)
        other = owner.allocate_blocks_cache(CacheDesc(2, (8, 16), DataType.DT_INT32))
        laid = owner.allocate_blocks_cache(LAID, BlocksCacheKey(0, 7))
        ended = owner.lease_blocks(laid, [1])
        owner.release(ended)
        there = [
            KEY, BlocksCacheKey(1, 6), BlocksCacheKey(3, 5), CacheIndex(1, paged.cache_id),
            CacheIndex(1, paged.cache_id, 1), CacheIndex(1, slots.cache_id, 2),
            CacheIndex(1, slots.cache_id, 9), CacheIndex(1, 99), CacheIndex(1, other.cache_id),
            CacheIndex(2, 1), None, BlocksCacheKey(1, 7), ended,
            owner.lease_blocks(paged, [3, 1, 5]), owner.lease_blocks(laid, [3, 1]),
            owner.lease_blocks(laid, [5, 2, 7], tokens=9), owner.lease_blocks(slots, [1]),
        ]  # fmt: skip
        gone = user.allocate_blocks_cache(PAGED)
        user.deallocate_cache(gone)
        floats = CacheDesc(4, (8, 16), DataType.DT_FLOAT)
        mine = [
            user.allocate_blocks_cache(PAGED), user.allocate_cache(SLOTS),
            user.allocate_blocks_cache(floats), user.allocate_blocks_cache(LAID),
        ]  # fmt: skip
        arrays = [array for item in mine for array in user.arrays(item)]
        arrays += [array for value in (paged, slots, other, laid) for array in owner.arrays(value)]
        yield Ends(user, there, [*mine, gone, None], arrays)


def outcome(ends: Ends, call: Callable[[], object]) -> tuple[object, ...]:
    """Return the effects of a call: its error, the written tensors, and its counters."""
    user = ends.user
    for number, array in enumerate(ends.arrays):
        array[:] = 1000 * number + np.arange(array.size).reshape(array.shape)
    before, link_before = counts(user), user.links()[0]
    try:
        call()
        error = ""
    except (LLMException, TypeError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    after, link_after = counts(user), user.links()[0]
    written = [array.tolist() for array in ends.arrays]
    counted = {name: count - before.get(name, 0) for name, count in after.items()}
    over_link = (
        link_after.operations - link_before.operations,
        link_after.bytes_pulled - link_before.bytes_pulled,
        link_after.bytes_pushed - link_before.bytes_pushed,
        link_after.in_flight,
    )
    return error, written, {name: count for name, count in counted.items() if count}, over_link


def counts(user: LlmDataDist) -> dict[str, int]:
    """Return the number of calls by status, and the moved bytes, for each operation."""
    found: dict[str, int] = {}
    for name, row in user.metrics()["operations"].items():
        found |= {f"{name} {status}": count for status, count in row["statuses"].items()}
        found |= {f"{name} bytes": row["nbytes"], f"{name} timed": row["seconds"]["count"]}
    return found


class AnyText(str):
    """A text that is equal to every text."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


class Alike:
    """An object that is equal to everything, and false."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "Alike()"


numbers = st.integers(-1, 9) | st.sampled_from([True, 0.0, None, np.int64(2), 2**70])
tables = (
    st.lists(st.integers(0, 7), max_size=8, unique=True)
    | st.lists(st.integers(-1, 9), max_size=5)
    | st.lists(numbers, max_size=3)
    | st.sampled_from([None, (1, 2), np.array([3, 1]), np.array([True]), "12", range(2)])
)
layers = st.sampled_from(
    [
        KvCacheExtParam(),
        KvCacheExtParam(range(1), range(1)),
        KvCacheExtParam(range(1, 2), range(1)),
        KvCacheExtParam(range(4), None, 1),
        KvCacheExtParam(range(3), range(3)),
        KvCacheExtParam(range(1), range(1), True),
        KvCacheExtParam(range(0, 1, 2), range(1)),
        None,
    ]
)
EXTRAS: dict[str, list[Any]] = {
    "num_tokens": [None, 0, 3],
    "coalesce": [Coalesce.SORTED, Coalesce.NONE, True, "sorted"],
    "timeout_ms": [None, 1000, -1, "1"],
    "tag": ["", "request 7", "\n", 0, AnyText("\n"), None],
    "notify": [None, b"", "text", Alike()],
    "notify_failure": [None, b"", "text", Alike()],
    "verify": [False, True, 0, Alike()],
    "reinterpret": [False, True, 0, Alike()],
}


@given(st.data())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_a_known_pair_has_the_same_effects_and_errors_as_an_operation(
    ends: Ends, data: st.DataObject
) -> None:
    """Error messages, bytes and counters are the same."""
    user = ends.user
    usual = data.draw(st.booleans())
    blocks = usual or data.draw(st.booleans())
    there = data.draw(st.sampled_from(ends.there[:1] if usual else ends.there))
    here = data.draw(st.sampled_from(ends.here[:1] if usual else ends.here))
    extras: dict[str, Any] = {}
    for name in data.draw(st.lists(st.sampled_from(sorted(EXTRAS)), max_size=1 if usual else 2)):
        extras[name] = data.draw(st.sampled_from(EXTRAS[name]))
    if data.draw(st.booleans()):
        extras["layers"] = data.draw(layers)
    pulls = data.draw(st.booleans())
    for name in ("src_token", "dst_token") if blocks else ("src_offset", "dst_offset"):
        if data.draw(st.integers(0, 9)) == 0:
            extras[name] = data.draw(st.sampled_from([0, False, 1, 0.0]))
    if blocks:
        src_blocks, dst_blocks = data.draw(tables), data.draw(tables)
        if data.draw(st.booleans()) and isinstance(src_blocks, list):
            dst_blocks = src_blocks[::-1]
        verb: Any = user.pull_blocks if pulls else user.push_blocks
        rows = src_blocks, dst_blocks
    else:
        verb = user.pull_cache if pulls else user.push_cache
        rows = data.draw(numbers), data.draw(st.sampled_from([-1, 8, -1.0]))
    arguments = (there, here, *rows) if pulls else (here, there, *rows)
    check_ways(ends, lambda: verb(*arguments, **extras))


def check_ways(ends: Ends, call: Callable[[], object]) -> None:
    """Compare a call by the short way with one by an operation, for a known pair and a new one."""
    quick = outcome(ends, call)
    remove = ends.user.on_plan(lambda _: None)
    try:
        assert quick == outcome(ends, call)
    finally:
        remove()
    with observe_plans():  # resolves every name, and plans every request
        assert quick == outcome(ends, call)


@pytest.mark.parametrize("name", sorted(EXTRAS))
def test_each_argument_is_checked_as_by_an_operation(ends: Ends, name: str) -> None:
    user, mine = ends.user, ends.here[0]
    for value in EXTRAS[name]:
        extras = {name: value}
        for verb, first, second in (
            (user.pull_blocks, KEY, mine),
            (user.push_blocks, mine, KEY),
        ):
            call: Any = partial(verb, first, second, [1], [2], **extras)  # type: ignore[arg-type]
            check_ways(ends, call)


def test_a_pull_whose_reinterpret_is_not_a_bool_is_refused(ends: Ends) -> None:
    for flag in ("x", 0, None):
        with pytest.raises(TypeError, match=f"reinterpret={flag!r} must be bool, not"):
            ends.user.pull_blocks(KEY, ends.here[0], [1], [2], reinterpret=flag)  # type: ignore[arg-type]
        rows = Transfer(Rows(KEY, [1]), Rows(ends.here[0], [2]), reinterpret=flag)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"part a: reinterpret={flag!r} must be bool, not"):
            ends.user.run({"a": rows})


FIELDS: dict[type[Rows | Transfer], tuple[set[str], dict[str, Any]]] = {
    Rows: ({"cache", "blocks", "first_token"}, {"slot": 0, "offset": 16}),
    Transfer: (
        {"src", "dst", "num_tokens", "layers"},
        {"nbytes": 64, "reinterpret": True, "coalesce": Coalesce.CALLER_ORDER, "rank": 0},
    ),
}
"""Fields of requests that bypass the planner, and values of other fields that prevent this."""


def test_the_bypass_of_the_planner_knows_every_field_of_a_transfer(ends: Ends) -> None:
    """A new field of a `Transfer` or `Rows` needs code there, or a row of unusual values here."""
    engine = ends.user._running()
    usual = Transfer(Rows(ends.there[3], [1, 2]), Rows(ends.here[0], [3, 4]))
    assert find_request(engine, usual) is not None
    for kind, (used, unusual) in FIELDS.items():
        assert {*kind.__struct_fields__} == used | unusual.keys()
    unusual_ones = [replace(usual, **{name: value}) for name, value in FIELDS[Transfer][1].items()]
    for name, value in FIELDS[Rows][1].items():
        unusual_ones.append(replace(usual, src=replace(usual.src, **{name: value})))
        unusual_ones.append(replace(usual, dst=replace(usual.dst, **{name: value})))
    assert [find_request(engine, one) for one in unusual_ones] == [None] * len(unusual_ones)
