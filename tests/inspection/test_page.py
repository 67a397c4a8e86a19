"""The document that `to_html` returns: self-contained, small, and safe with any name."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    Coalesce,
    DataType,
    Plan,
    RemoteCache,
    Rows,
    Shard,
    Transfer,
)
from kvplan.inspection.explain import oddities
from tests.support.plans import joined

FP16 = DataType.DT_FLOAT16
DESC = CacheDesc(4, (16, 16, 8, 128), FP16, kv_tensor_format="NHD")
PLAN = kvplan.plan(Transfer(Rows(DESC, [4, 5, 9]), Rows(DESC, [7, 8, 2])), local="dst")
EVIL = "</script><img src=x onerror=alert(1)><!--"


def scattered(blocks: int = 4096, layers: int = 61) -> Plan:
    rng = np.random.default_rng(1)
    desc = CacheDesc(2 * layers, (2 * blocks, 16, 8, 128), FP16, kv_tensor_format="NHD")
    src, dst = (rng.permutation(2 * blocks)[:blocks] for _ in range(2))
    return kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")


@pytest.mark.parametrize("coalesce", Coalesce)
def test_a_large_plan_is_a_small_document(coalesce: Coalesce) -> None:
    rng = np.random.default_rng(2)
    runs = np.concatenate(
        [np.arange(number * 64, number * 64 + 64) for number in rng.permutation(64)]
    )
    desc = CacheDesc(122, (8192, 16, 8, 128), FP16, kv_tensor_format="NHD")
    for plan in (
        scattered(),
        kvplan.plan(
            Transfer(Rows(desc, runs), Rows(desc, np.arange(4096)), coalesce=coalesce), local="dst"
        ),
    ):
        assert len(plan.to_html().encode()) < 500_000


def test_a_page_has_the_svg_of_each_part() -> None:
    assert PLAN.to_svg() in PLAN.to_html()
    both = joined({"a": PLAN, "b": PLAN}).to_html()
    assert both.count("<section>") == both.count("<svg ") == 2


def test_a_comparison_has_the_text_and_both_pictures() -> None:
    other = kvplan.plan(Transfer(Rows(DESC, [5, 4, 9]), Rows(DESC, [7, 8, 2])), local="dst")
    document = PLAN.to_html(diff=other)
    assert html.escape(PLAN.diff(other)) in document
    assert (
        "<h1>verdict: different bytes - 262,144 destination bytes from another source</h1>"
        in document
    )
    assert PLAN.to_svg() in document
    assert other.to_svg() in document


def test_a_page_loads_nothing() -> None:
    document = PLAN.to_html()
    addresses = {*re.findall(r"https?://[^\"' ]+", document)}
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace
    assert "default-src 'none'" in document
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", document) == ["data:,"]


def test_a_page_is_written_to_a_given_path(tmp_path: Path) -> None:
    for plan in (PLAN, joined({"a": PLAN})):
        for method, name in ((plan.to_html, "it.html"), (plan.to_svg, "it.svg")):
            text = method(tmp_path / name)
            assert (tmp_path / name).read_text(encoding="utf-8") == text == method()
            assert method(str(tmp_path / name)) == text


def test_names_of_users_cannot_end_an_element() -> None:
    """Names are escaped in every place where they occur."""
    name = EVIL[:64]
    of_peer = RemoteCache(BlocksCacheKey(1), DESC)
    opaque = CacheDesc(2, (4, 8), FP16, kv_tensor_format=f"opaque {name}")
    labelled = kvplan.plan(Transfer(Rows(opaque, [1]), Rows(opaque, [2])), local="dst")
    pulled = kvplan.plan(Transfer(Rows(of_peer, [1]), Rows(DESC, [2])), local="dst")
    groups = joined({name: PLAN, "other": labelled})
    for document in (
        labelled.to_html(notes=[name]),
        groups.to_html(),
        groups.to_html(diff=joined({"x" + name: PLAN, "other": pulled})),
        labelled.to_html(diff=PLAN),
    ):
        assert html.escape(name) in document
        assert document.count("</script>") == 1
        assert "<img" not in document
        assert document.count("<!--") == 0


def test_half_a_character_in_a_name_is_replaced(tmp_path: Path) -> None:
    evil = PLAN.to_dict()
    evil["parts"][0]["src"]["name"] = "half \ud800"
    Plan.from_dict(evil).to_html(tmp_path / "page.html")
    assert "of a peer half �: " in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_notebook_shows_the_document_in_a_frame() -> None:
    for plan in (PLAN, joined({EVIL: PLAN})):
        cell: Any = plan._repr_html_()
        found = re.fullmatch(
            r'<iframe title="[^"<>]*" sandbox="allow-scripts" loading="lazy" style="[^"<>]*" '
            r'srcdoc="([^"]*)"></iframe>',
            cell,
            re.DOTALL,
        )
        assert found is not None
        assert html.unescape(found[1]) == plan.to_html()


def test_notes_are_text_above_the_picture() -> None:
    document = PLAN.to_html(notes=["The lease is <stale>."])
    assert document.index("<p>The lease is &lt;stale&gt;.</p>") < document.index("<svg")


def test_a_value_that_is_not_a_plan_is_refused() -> None:
    with pytest.raises(TypeError, match="diff"):
        PLAN.to_html(diff=PLAN.part)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="notes"):
        PLAN.to_html(notes=[1])  # type: ignore[list-item]


def test_oddities_are_described_in_words() -> None:
    bf16 = CacheDesc(4, (16, 16, 8, 128), DataType.DT_BF16, kv_tensor_format="NHD")
    assert oddities(
        kvplan.plan(Transfer(Rows(DESC, [0]), Rows(bf16, [1]), reinterpret=True), local="dst").part
    ) == [
        "REINTERPRETED: the bytes are copied as they are, whatever the two sides say that they "
        "mean: DT_FLOAT16 (block 16, token 16, head 8, dim 128) at the source, DT_BF16 (block 16, "
        "token 16, head 8, dim 128) at the destination."
    ]
    source = CacheDesc(4, (64, 16, 2, 128), FP16, kv_tensor_format="NHD",
                       shard=Shard(heads=range(2, 4), num_heads=8))  # fmt: skip
    turned = CacheDesc(4, (32, 4, 32, 128), FP16, kv_tensor_format="HND",
                       shard=Shard(heads=range(4), num_heads=8))  # fmt: skip
    assert oddities(
        kvplan.plan(
            Transfer(Rows(source, [5, 9, 6]), Rows(turned, [3, 1]), num_tokens=40), local="dst"
        ).part
    ) == [
        "Transposing: the axes lie in another order at the two ends, so that each block is moved "
        "in 32 runs of 256 B.",
        "Tiny runs: 320 descriptors of less than 2 KiB, each of which costs more than its bytes "
        "do.",
    ]
    slots = CacheDesc(4, (2, 64, 2, 128), FP16, kv_tensor_format="slot token head dim")
    turned = CacheDesc(4, (32, 2, 8, 128), FP16, kv_tensor_format="HND")
    assert oddities(
        kvplan.plan(
            Transfer(Rows(slots, slot=1), Rows(turned, [3, 1]), num_tokens=16), local="dst"
        ).part
    )[0] == (
        "Transposing: the axes lie in another order at the two ends, so that each block is moved "
        "in 16 runs of 256 B."
    )
    half = CacheDesc(4, (64, 16, 4, 128), FP16, kv_tensor_format="NHD",
                     shard=Shard(heads=range(2, 6), num_heads=8))  # fmt: skip
    assert oddities(kvplan.plan(Transfer(Rows(source, [5]), Rows(half, [3])), local="dst").part)[
        0
    ] == ("Cut by head or token: each block is moved in 16 runs of 512 B.")
    assert oddities(
        kvplan.plan(Transfer(Rows(DESC, [1, 3]), Rows(DESC, [4, 9])), local="dst").part
    ) == ["Scattered: each of the 2 blocks is a run alone, as no two are neighbours at both ends."]
    one_slot = CacheDesc(4, (2, 16, 8, 128), FP16, kv_tensor_format="slot token head dim")
    assert oddities(
        kvplan.plan(
            Transfer(Rows(one_slot), Rows(DESC, [3, 1], first_token=8), num_tokens=16), local="dst"
        ).part
    ) == ["Scattered: each of the 2 blocks is a run alone, as no two are neighbours at both ends."]
    assert oddities(PLAN.part) == [
        "Alone: 1 of 2 runs is one block, which has no neighbour at both ends."
    ]
    assert oddities(
        kvplan.plan(
            Transfer(Rows(DESC, [1, 2]), Rows(DESC, [4, 5]), coalesce=Coalesce.NONE), local="dst"
        ).part
    ) == ["Not merged: 1 run could be one with the run before (coalesce is none)."]
    assert oddities(
        kvplan.plan(Transfer(Rows(DESC, [1, 1, 2, 2]), Rows(DESC, [1, 2, 4, 6])), local="src").part
    )[0] == ("Source block 1 is read 2 times, and 1 more are: is the block table right?")
    large = CacheDesc(4, (16, 64, 8, 128), FP16, kv_tensor_format="NHD")
    assert (
        oddities(
            kvplan.plan(Transfer(Rows(DESC, [5, 2, 9, 1]), Rows(large, [3])), local="dst").part
        )
        == []
    )  # runs without blocks
    assert oddities(kvplan.plan(Transfer(Rows(DESC, [1, 1]), Rows(DESC, [2, 3]))).part) != []
