"""The methods of the reference's interface pass on each of their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    Coalesce,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    Placement,
    Rows,
    Transfer,
)

KEY = BlocksCacheKey(1, 7)
SLOT = CacheIndex(1, 3, 2)
LAYERS = KvCacheExtParam(range(1), range(1, 2), 1)
HOST, DEVICE = (
    Cache(CacheDesc(2, (8, 4), DataType.DT_INT8, placement), cache_id=number)
    for number, placement in enumerate((Placement.HOST, Placement.DEVICE))
)
LABELS = {"coalesce": Coalesce.NONE, "reinterpret": True}
OPTIONS = {"timeout_ms": 5.0, "notify": b"here", "notify_failure": b"lost", "tag": "r1"}
ROW = {"num_tokens": 9, "src_offset": 16, "dst_offset": 24}
TABLES = {"num_tokens": 9, "src_token": 5, "dst_token": 6}


class Requests(LlmDataDist):
    """An engine that keeps its requests instead of moving bytes."""

    def run(self, transfer: Any, **options: Any) -> None:
        self.request = transfer, options


@pytest.mark.parametrize(
    ("name", "positional", "named", "src", "dst", "fields"),
    [
        (
            "pull_cache", (SLOT, HOST, 4, 32, LAYERS), ROW,
            Rows(SLOT, offset=16), Rows(HOST, slot=4, offset=24),
            {"num_tokens": 9, "nbytes": 32, "layers": LAYERS},
        ),
        (
            "push_cache", (HOST, SLOT, 4, 32, LAYERS), ROW,
            Rows(HOST, slot=4, offset=16), Rows(SLOT, offset=24),
            {"num_tokens": 9, "nbytes": 32, "layers": LAYERS},
        ),
        (
            "pull_blocks", (KEY, HOST, [1, 2], [3, 4], LAYERS), TABLES,
            Rows(KEY, [1, 2], first_token=5), Rows(HOST, [3, 4], first_token=6),
            {"num_tokens": 9, "layers": LAYERS},
        ),
        (
            "push_blocks", (HOST, KEY, [1, 2], [3, 4], LAYERS), TABLES,
            Rows(HOST, [1, 2], first_token=5), Rows(KEY, [3, 4], first_token=6),
            {"num_tokens": 9, "layers": LAYERS},
        ),
        (
            "copy_cache", (HOST, DEVICE, 2, 3, 16, 32), {},
            Rows(HOST, slot=2, offset=16), Rows(DEVICE, slot=3, offset=16), {"nbytes": 32},
        ),
        ("swap_blocks", (HOST, DEVICE, {1: 3}), {}, Rows(HOST, [1]), Rows(DEVICE, [3]), {}),
    ],
)  # fmt: skip
def test_each_argument_has_its_place_in_the_transfer(
    name: str,
    positional: tuple[Any, ...],
    named: dict[str, Any],
    src: Rows,
    dst: Rows,
    fields: dict[str, Any],
) -> None:
    engine = Requests(2, LlmRole.DECODER)
    getattr(engine, name)(*positional, **named, **LABELS, **OPTIONS)
    assert same(engine.request, (Transfer(src, dst, **fields, **LABELS), OPTIONS))


def test_copies_of_blocks_take_both_columns_of_pairs() -> None:
    engine = Requests(2, LlmRole.DECODER)
    engine.copy_blocks(HOST, {1: [3, 4]}, coalesce=Coalesce.NONE, timeout_ms=5.0, tag="r1")
    transfer = Transfer(Rows(HOST, [1, 1]), Rows(HOST, [3, 4]), coalesce=Coalesce.NONE)
    assert same(engine.request, (transfer, {"timeout_ms": 5.0, "tag": "r1"}))


def same(found: tuple[Transfer, Any], wanted: tuple[Transfer, Any]) -> bool:
    """Compare requests, whose block tables may be arrays."""
    return [*map(plain, found)] == [*map(plain, wanted)]


def plain(value: Any) -> Any:
    if isinstance(value, Transfer | Rows):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, np.ndarray | list | tuple):
        return [int(block) for block in value]
    return value
