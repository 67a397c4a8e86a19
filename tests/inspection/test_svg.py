"""The picture for documents: the exact text of small ones, and well-formed output of all."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvplan
from kvplan import (
    CacheDesc,
    Coalesce,
    DataType,
    KvCacheExtParam,
    Placement,
    Plan,
    Rows,
    Shard,
    Transfer,
)
from kvplan.inspection.svg import _side_by_side
from tests.planning.test_unlike import planned
from tests.planning.test_unlike import transfers as unlike_transfers
from tests.planning.transfers import Example, transfers
from tests.support.plans import joined

DOCS = Path(__file__).parents[2] / "docs"
NHD = CacheDesc(4, (16, 16, 8, 128), DataType.DT_FLOAT16, kv_tensor_format="NHD")
SMALL = kvplan.plan(Transfer(Rows(NHD, [4, 5, 9]), Rows(NHD, [7, 8, 2])), local="dst")
SPACE = "{http://www.w3.org/2000/svg}"


def in_readme() -> Plan:
    """Return the plan of the picture in README."""
    desc = CacheDesc(64, (256, 16, 8, 128), DataType.DT_FLOAT16, kv_tensor_format="NHD")
    src = [10, 11, 12, 13, 40, 41, 90, 91, 92, 93, 94, 95, 7, 30, 31, 32]
    dst = [100, 101, 102, 103, 104, 105, 106, 107, 20, 21, 22, 23, 24, 25, 26, 61]
    return kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")


def unlike() -> Plan:
    src = CacheDesc(4, (64, 16, 2, 128), DataType.DT_FLOAT16, kv_tensor_format="NHD",
                    shard=Shard(heads=range(2, 4), num_heads=8))  # fmt: skip
    dst = CacheDesc(4, (32, 4, 32, 128), DataType.DT_FLOAT16, kv_tensor_format="HND",
                    shard=Shard(heads=range(4), num_heads=8))  # fmt: skip
    return kvplan.plan(
        Transfer(Rows(src, [5, 9, 6]), Rows(dst, [3, 1]), num_tokens=40), local="dst"
    )


GOLDEN = {"small": SMALL, "unlike": unlike()}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_text_of_a_picture(name: str) -> None:
    """`python -m tests.inspection.test_svg` writes the expected texts, tests/inspection/*.svg."""
    drawn = Path(__file__).with_name(f"{name}.svg").read_text(encoding="utf-8")
    assert GOLDEN[name].to_svg() == drawn


SLOTS = CacheDesc(4, (3, 64, 8, 128), DataType.DT_FLOAT16, kv_tensor_format="slot token head dim")
IN_HOST = replace(NHD, placement=Placement.HOST)
INSIDE = CacheDesc(
    1, (16, 3, 16, 8, 128), DataType.DT_FLOAT16, kv_tensor_format="block layer token head dim"
)


@pytest.mark.parametrize(
    ("plan", "title"),
    [
        (
            kvplan.plan(
                Transfer(Rows(NHD, [4]), Rows(NHD, [7]), layers=KvCacheExtParam((1, 1), (0, 0))),
                local="src",
            ),
            "Pushes 1 block into 1 block of a peer, in 1 layer: 64 KiB in 2 descriptors.",
        ),
        (
            kvplan.plan(Transfer(Rows(SLOTS, slot=1), Rows(NHD, [5, 2])), local="dst"),
            "Pulls 1 slot of a peer into 2 blocks, in 2 layers: 256 KiB in 8 descriptors.",
        ),
        (
            kvplan.plan(Transfer(Rows(SLOTS, slot=1), Rows(SLOTS, slot=2)), local="src"),
            "Pushes 1 slot into 1 slot of a peer, in 2 layers: 512 KiB in 4 descriptors.",
        ),
        (  # two requests continue one: its block is read twice
            kvplan.plan(Transfer(Rows(NHD, [0, 0, 3]), Rows(NHD, [1, 2, 6]))),
            "Copies 2 blocks into 3 blocks, in 2 layers: 384 KiB in 12 descriptors.",
        ),
        (
            kvplan.plan(Transfer(Rows(IN_HOST, [0]), Rows(NHD, [1]))),
            "Swaps 1 block into 1 block, in 2 layers: 128 KiB in 4 descriptors.",
        ),
        (
            kvplan.plan(Transfer(Rows(INSIDE, [0]), Rows(INSIDE, [1]), num_tokens=5), local="dst"),
            "Pulls 5 tokens, 1 block of a peer into 1 block, in 3 layers: 30 KiB in 3 descriptors.",
        ),
        (
            kvplan.plan(Transfer(Rows(INSIDE, [0]), Rows(INSIDE, [1])), local="dst"),
            "Pulls 1 block of a peer into 1 block, in 3 layers: 96 KiB in 1 descriptor.",
        ),
    ],
)
def test_the_title_says_what_moves(plan: Plan, title: str) -> None:
    assert f">{title}</text>" in plan.to_svg()


def test_the_picture_of_the_readme_is_current() -> None:
    """`python -m tests.inspection.test_svg` writes the picture."""
    drawn = (DOCS / "pictures/plan.svg").read_text(encoding="utf-8")
    assert in_readme().to_svg() == drawn
    assert "docs/pictures/plan.svg" in (DOCS.parent / "README.md").read_text(encoding="utf-8")


def well_formed(text: str) -> ET.Element:
    root = ET.fromstring(text)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for element in root.iter(f"{SPACE}text"):
        assert 0 <= float(element.get("x", "")) <= width
        assert 0 <= float(element.get("y", "")) <= height
    assert "<script" not in text
    return root


@settings(max_examples=30)
@given(transfers(), st.sampled_from(Coalesce))
def test_every_band_is_drawn(example: Example, coalesce: Coalesce) -> None:
    plan = example.plan(coalesce)
    root = well_formed(plan.to_svg())
    ribbons = [element for element in root.iter(f"{SPACE}path") if element.get("class") == "ribbon"]
    assert len(ribbons) <= plan.part.segments.num_runs
    rows = {
        row
        for number in range(plan.part.segments.num_runs)
        for row in [plan.origin(number).dst_rows]
    }
    assert len(ribbons) >= len(rows)


@settings(max_examples=30)
@given(unlike_transfers())
def test_unlike_caches_are_drawn(transfer: object) -> None:
    well_formed(planned(transfer, True).to_svg())


def test_thousands_of_bands_are_lines() -> None:
    rng = np.random.default_rng(1)
    desc = CacheDesc(122, (8192, 16, 8, 128), DataType.DT_FLOAT16)
    src, dst = (rng.permutation(8192)[:4096] for _ in range(2))
    plan = kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")
    text = plan.to_svg()
    root = well_formed(text)
    lines = [element for element in root.iter(f"{SPACE}path") if element.get("class") == "line"]
    assert sum(line.get("d", "").count("M") for line in lines) == 4096
    colours = [line.get("stroke") for line in lines]
    assert (colours[0], colours[-1]) == ("#3b4dc0", "#be4212")  # near the ends of the scale
    assert len(text) < 500_000


def test_only_some_of_very_many_bands_are_drawn() -> None:
    rng = np.random.default_rng(1)
    desc = CacheDesc(2, (1 << 16, 1, 1, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")
    src, dst = (rng.permutation(1 << 16)[:20_000] for _ in range(2))
    plan = kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")
    text = plan.to_svg()
    root = well_formed(text)
    lines = [element for element in root.iter(f"{SPACE}path") if element.get("class") == "line"]
    drawn = sum(line.get("d", "").count("M") for line in lines)
    assert drawn == -(-plan.part.segments.num_runs // 5) <= 4096
    assert f"Only one of 5 runs is drawn: there are {plan.part.segments.num_runs:,}." in text
    titles = [element[0].text or "" for element in root.iter(f"{SPACE}g")]
    assert sum(int(title.split()[0]) for title in titles) == plan.part.segments.num_runs


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        (Placement.DEVICE, Placement.DEVICE, []),  # the default, also of caches in host memory
        (Placement.HOST, Placement.HOST, ["on host", "on host"]),
        (Placement.DEVICE, Placement.HOST, ["on device", "on host"]),
    ],
)
def test_a_placement_is_named_if_it_is_not_the_default(
    src: Placement, dst: Placement, words: list[str]
) -> None:
    a, b = (CacheDesc(2, (4, 8), DataType.DT_FLOAT16, side) for side in (src, dst))
    text = kvplan.plan(Transfer(Rows(a, [1]), Rows(b, [2]))).to_svg()
    assert re.findall(r"on (?:host|device)", text) == words


@pytest.mark.parametrize("name", ["</svg><script>", "a & \"b\" 'c'", "日本"])
def test_names_are_escaped(name: str) -> None:
    root = ET.fromstring(joined({name: SMALL, "b": SMALL}).to_svg())
    texts = [element.text or "" for element in root.iter(f"{SPACE}text")]
    assert any(text.endswith(f"part {name}") for text in texts)


def test_bands_from_one_block_are_side_by_side() -> None:
    root = well_formed(kvplan.plan(Transfer(Rows(NHD, [1, 1]), Rows(NHD, [2, 3]))).to_svg())
    ends = [
        element.get("x") for element in root.iter(f"{SPACE}text") if element.get("class") == "end"
    ]
    assert len(ends) == 4
    assert len({*ends}) == 2


def test_several_bands_share_a_place_without_overlap() -> None:
    places = [(0.0, 9.0), (20.0, 30.0), (0.0, 9.0), (0.0, 9.0)]
    assert _side_by_side(places) == [(0, 3), (20, 30), (3, 6), (6, 9)]


if __name__ == "__main__":
    for name, plan in GOLDEN.items():
        plan.to_svg(Path(__file__).with_name(f"{name}.svg"))
    in_readme().to_svg(DOCS / "pictures/plan.svg")
