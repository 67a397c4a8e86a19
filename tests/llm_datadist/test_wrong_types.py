"""Values of one surface given to the other: the message has the full name of the class."""

from __future__ import annotations

from typing import Any

import pytest

import kvplan
from kvplan import Rows, Transfer
from kvplan import llm_datadist as official
from kvplan.llm_datadist.utils.utils import check_isinstance
from kvplan.validation import mismatch

NATIVE = kvplan.CacheDesc(2, (2, 8), kvplan.DataType.DT_INT8)
OFFICIAL: Any = official.CacheDesc(2, [2, 8], official.DataType.DT_INT8)


def test_an_official_description_is_refused_as_a_native_one() -> None:
    with pytest.raises(TypeError) as caught:
        kvplan.plan(Transfer(Rows(OFFICIAL, slot=0), Rows(NATIVE, slot=1)))
    native = "kvplan.types.CacheDesc or kvplan.types.Cache or kvplan.types.RemoteCache"
    assert f"must be {native}, not {type(OFFICIAL).__module__}.CacheDesc;" in str(caught.value)


@pytest.mark.parametrize("kind", ["CacheDesc", "Cache"])
def test_a_native_value_is_refused_as_an_official_one(kind: str) -> None:
    native = {"CacheDesc": NATIVE, "Cache": kvplan.Cache(NATIVE, 1)}[kind]
    needed = getattr(official, kind)
    with pytest.raises(TypeError, match=rf"{needed.__module__}.{kind}, not kvplan.types.{kind}$"):
        check_isinstance("it", native, needed)
    with pytest.raises(TypeError, match=rf"{needed.__module__}.{kind}, not kvplan.types.{kind}$"):
        check_isinstance("it", [native], list, needed)


def test_names_that_differ_stay_short() -> None:
    assert mismatch(1.5, int, str) == "int or str, not float"
