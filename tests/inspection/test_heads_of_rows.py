"""The rows of a diff name the heads that they write, and no heads between them."""

from __future__ import annotations

import re

import pytest

import kvplan
from kvplan import CacheDesc, DataType, Rows, Shard, Transfer


def part(layout: str, heads: range) -> CacheDesc:
    lengths = {"block": 4, "token": 8, "head": len(heads), "dim": 4}
    axes = layout.split()
    shape = tuple(lengths[ax] for ax in axes)
    shard = Shard(range(1), heads, 1, 5)
    return CacheDesc(2, shape, DataType.DT_FLOAT16, kv_tensor_format=layout, shard=shard)


NHD, HND = "block token head dim", "block head token dim"


@pytest.mark.parametrize("layouts", [(HND, NHD), (NHD, HND)])
@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        (range(2, 3), range(1, 2), ("head 2", "head 1")),
        (range(2, 4), range(2), ("heads 2..3", "heads 0..1")),
        (range(5), range(5), ()),
    ],
)
def test_a_row_names_its_heads(
    layouts: tuple[str, str], right: range, wrong: range, words: tuple[str, ...]
) -> None:
    dst = part(layouts[1], range(5))
    plans = [
        kvplan.plan(
            Transfer(Rows(part(layouts[0], tensor), [3, 0]), Rows(dst, [1, 2])), local="dst"
        )
        for tensor in (right, wrong)
    ]
    text = plans[0].diff(plans[1])
    rows = re.findall(r"^([-+]) .*  tokens \d+\.\.\d+ (heads? [\d.]+)$", text, re.MULTILINE)
    assert set(rows) == {*zip("-+", words, strict=False)}
