"""Arguments of a wrong type or size: the refusal names the argument, and is not one of Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import (
    Cache,
    CacheDesc,
    DataType,
    LlmDataDist,
    LlmRole,
    Plan,
    Rows,
    Shard,
    Transfer,
    Transfers,
)
from tests.support.refusals import refused

DESC = CacheDesc(1, (4, 64), DataType.DT_INT8)
HUGE = 10**400  # more than a float can be


@pytest.fixture(scope="module")
def engine() -> Iterator[LlmDataDist]:
    with LlmDataDist(1, LlmRole.MIX) as engine:
        engine.initialize()
        yield engine


@pytest.fixture(scope="module")
def cache(engine: LlmDataDist) -> Cache:
    return engine.allocate_blocks_cache(DESC)


def move_nothing(cache: Cache) -> tuple[Plan, list[Any], list[Any]]:
    plan = kvplan.plan(Transfer(Rows(DESC, [0]), Rows(DESC, [1])))
    return plan, *([np.zeros(DESC.tensor_nbytes, np.int8)] for _ in range(2))


CALLS: dict[str, Callable[[LlmDataDist, Cache, Any], object]] = {
    "run": lambda engine, cache, value: engine.run(
        Transfer(Rows(cache, [0]), Rows(cache, [1])), timeout_ms=value
    ),
    "execute": lambda _, cache, value: kvplan.execute(*move_nothing(cache), timeout_ms=value),
    "submit of one": lambda engine, cache, value: engine.submit(
        Transfer(Rows(cache, [0]), Rows(cache, [1]))
    ).wait(value),
    "submit of several": lambda engine, cache, value: engine.submit(
        {str(to): Transfer(Rows(cache, [0]), Rows(cache, [to])) for to in (1, 2)}
    ).wait(value),
    "notify": lambda engine, _, value: engine.notify(2, b"x", timeout_ms=value),
    "notifications": lambda engine, _, value: engine.notifications().wait(value),
    "completions": lambda engine, _, value: engine.completions().wait(value),
}


@pytest.mark.parametrize("wrong", ["soon", True, b"", [1], np.array([1, 2])], ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_a_timeout_is_a_number(engine: LlmDataDist, cache: Cache, call: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"timeout_ms=.* must be a number or None"):
        CALLS[call](engine, cache, wrong)


@pytest.mark.parametrize("call", CALLS)
def test_a_timeout_may_be_a_number_of_numpy(engine: LlmDataDist, cache: Cache, call: str) -> None:
    with pytest.raises(ValueError, match="timeout_ms=-1"):
        CALLS[call](engine, cache, np.float32(-1))


@pytest.mark.parametrize("wrong", [HUGE, -HUGE, float("nan")], ids=["huge", "negative", "nan"])
@pytest.mark.parametrize("call", CALLS)
def test_a_timeout_is_in_the_range_of_floats(
    engine: LlmDataDist, cache: Cache, call: str, wrong: float
) -> None:
    with pytest.raises(ValueError, match=r"^timeout_ms=.* must be "):
        CALLS[call](engine, cache, wrong)


@pytest.mark.parametrize("wrong", [-5, 0])
def test_the_range_of_a_timeout_is_the_same_for_each_value(
    engine: LlmDataDist, wrong: float
) -> None:
    with pytest.raises(ValueError, match=f"^timeout_ms={wrong} must be > 0 or None$"):
        engine.notify(2, b"x", timeout_ms=wrong)


def test_a_lifetime_beyond_all_floats_is_out_of_range(engine: LlmDataDist, cache: Cache) -> None:
    with refused("LLM_PARAM_INVALID", r"^ttl_ms=1000.* must be in \(0, "):
        engine.lease_blocks(cache, [0], ttl_ms=HUGE)


def test_a_cluster_is_a_number(engine: LlmDataDist) -> None:
    with pytest.raises(TypeError, match=r"^cluster_id=\[\] must be int, not list"):
        engine.caches([])  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["layers", "heads"])
def test_one_number_is_not_a_range(name: str) -> None:
    one: dict[str, Any] = {name: np.int64(3)}
    with pytest.raises(TypeError, match=f"^{name}=.* must be a range or a sequence of int"):
        Shard(**one)


def test_layers_may_be_an_array_that_has_no_shape() -> None:
    """Arrays of Arrow have no shape."""

    class Array:
        def __array__(self) -> Any:
            return np.array([2, 5])

        def __iter__(self) -> Iterator[int]:
            return iter([2, 5])

    layers: Any = Array()
    assert Shard(layers=layers, num_layers=8).layers == (2, 5)


ARRAYS: tuple[Any, ...] = (np.array([1, 2]), np.array([]))


@pytest.mark.parametrize("value", [*ARRAYS, "x", 1.5], ids=repr)
def test_a_flag_or_number_that_is_an_array_is_refused_by_its_name(value: Any) -> None:
    desc = CacheDesc(1, (8, 64), DataType.DT_INT8)
    with LlmDataDist(1, LlmRole.MIX) as engine:
        engine.initialize({"kvplan.transport": "local"})
        cache, other = (engine.allocate_blocks_cache(desc) for _ in range(2))
        copy = Transfer(Rows(cache, [1]), Rows(other, [2]))
        calls: dict[str, Callable[[], object]] = {
            "verify": lambda: engine.run(copy, verify=value),
            "by_layer": lambda: engine.plan(copy, by_layer=value),
            "copy": lambda: engine.arrays(cache, copy=value),
            "stop": lambda: engine.submit(copy).wait(1000, stop=value),
            "threads": lambda: Transfers(value),
            "wrap": lambda: Transfers(1, wrap=value),
            "tuning": lambda: Transfers(1, tuning=value),
            "nodes": lambda: Transfers(1, nodes=value),
        }
        for name, call in calls.items():
            with pytest.raises(TypeError, match=f"^{name}=.* must be "):
                call()
