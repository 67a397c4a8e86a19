"""The document that `to_html` returns: self-contained, small, and safe whatever names are in it."""

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
from tests.inspection.test_bands import embedded
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
    runs = np.concatenate([np.arange(it * 64, it * 64 + 64) for it in rng.permutation(64)])
    desc = CacheDesc(122, (8192, 16, 8, 128), FP16, kv_tensor_format="NHD")
    for plan in (
        scattered(),
        kvplan.plan(
            Transfer(Rows(desc, runs), Rows(desc, np.arange(4096)), coalesce=coalesce), local="dst"
        ),
    ):
        assert len(plan.to_html().encode()) < 300_000


def test_a_comparison_of_large_plans_is_small_too() -> None:
    plan = scattered()
    assert plan.part.tables is not None
    reversed_ = kvplan.plan(
        Transfer(
            Rows(plan.part.src, plan.part.tables.src[::-1].copy()),
            Rows(plan.part.dst, plan.part.tables.dst),
        ),
        local="dst",
    )
    document = plan.to_html(diff=reversed_)
    assert len(document.encode()) < 400_000
    assert embedded(document)[0]["count"] == 8192


def test_it_asks_for_nothing() -> None:
    document = PLAN.to_html()
    addresses = {*re.findall(r"https?://[^\"' ]+", document)}
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name
    assert "default-src 'none'" in document
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", document) == ["data:,"]


def test_it_is_written_where_a_path_is_given(tmp_path: Path) -> None:
    for plan in (PLAN, joined({"a": PLAN})):
        for method, name in ((plan.to_html, "it.html"), (plan.to_svg, "it.svg")):
            text = method(tmp_path / name)
            assert (tmp_path / name).read_text(encoding="utf-8") == text == method()
            assert method(str(tmp_path / name)) == text


def named(name: str) -> list[str]:
    """Documents in which a name of a user is everywhere that one can be."""
    of_peer = RemoteCache(BlocksCacheKey(1), DESC)
    opaque = CacheDesc(2, (4, 8), FP16, kv_tensor_format=f"opaque {name}")
    labelled = kvplan.plan(Transfer(Rows(opaque, [1]), Rows(opaque, [2])), local="dst")
    pulled = kvplan.plan(Transfer(Rows(of_peer, [1]), Rows(DESC, [2])), local="dst")
    groups = joined({name: PLAN, "other": labelled})
    old = joined({"x" + name: PLAN, "other": pulled})
    return [
        labelled.to_html(notes=[name]),
        groups.to_html(),
        groups.to_html(diff=old),
        labelled.to_html(diff=PLAN),
    ]


def test_names_of_users_cannot_end_an_element() -> None:
    for document in named(EVIL[:64]):
        assert document.count("</script>") == 2
        assert "<img" not in document
        assert document.count("<!--") == 0
        assert embedded(document)


def test_half_a_character_in_a_name_is_written_as_a_question_mark(tmp_path: Path) -> None:
    evil = PLAN.to_dict()
    evil["src"]["name"] = "half \ud800"
    Plan.from_dict(evil).to_html(tmp_path / "page.html")
    assert '"name":"half ?"' in (tmp_path / "page.html").read_text(encoding="utf-8")


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


def notes(plan: Plan, **options: Any) -> list[str]:
    said: list[str] = embedded(plan.to_html(**options))[0]["notes"]
    return said


def test_what_is_odd_is_said_in_words() -> None:
    bf16 = CacheDesc(4, (16, 16, 8, 128), DataType.DT_BF16, kv_tensor_format="NHD")
    assert notes(
        kvplan.plan(Transfer(Rows(DESC, [0]), Rows(bf16, [1]), reinterpret=True), local="dst")
    ) == [
        "REINTERPRETED: the bytes are copied as they are, whatever the two sides say that they "
        "mean: DT_FLOAT16 (block 16, token 16, head 8, dim 128) at the source, DT_BF16 (block 16, "
        "token 16, head 8, dim 128) at the destination."
    ]
    source = CacheDesc(4, (64, 16, 2, 128), FP16, kv_tensor_format="NHD",
                       shard=Shard(heads=range(2, 4), num_heads=8))  # fmt: skip
    turned = CacheDesc(4, (32, 4, 32, 128), FP16, kv_tensor_format="HND",
                       shard=Shard(heads=range(4), num_heads=8))  # fmt: skip
    assert notes(
        kvplan.plan(
            Transfer(Rows(source, [5, 9, 6]), Rows(turned, [3, 1]), num_tokens=40), local="dst"
        )
    ) == [
        "Transposing: the axes lie in another order at the two ends, so that each block is moved "
        "in 32 runs of 256 B.",
        "Tiny runs: 320 descriptors of less than 2 KiB, each of which costs more than its bytes "
        "do.",
    ]
    half = CacheDesc(4, (64, 16, 4, 128), FP16, kv_tensor_format="NHD",
                     shard=Shard(heads=range(2, 6), num_heads=8))  # fmt: skip
    assert notes(kvplan.plan(Transfer(Rows(source, [5]), Rows(half, [3])), local="dst"))[0] == (
        "Cut by head or token: each block is moved in 16 runs of 512 B."
    )
    assert notes(kvplan.plan(Transfer(Rows(DESC, [1, 3]), Rows(DESC, [4, 9])), local="dst")) == [
        "Scattered: each of the 2 blocks is a run alone, as no two are neighbours at both ends."
    ]
    assert notes(PLAN) == ["Alone: 1 of 2 runs is one block, which has no neighbour at both ends."]
    assert notes(
        kvplan.plan(
            Transfer(Rows(DESC, [1, 2]), Rows(DESC, [4, 5]), coalesce=Coalesce.NONE), local="dst"
        )
    ) == ["Not merged: 1 run could be one with the run before (coalesce is none)."]
    assert notes(
        kvplan.plan(Transfer(Rows(DESC, [1, 1, 2, 2]), Rows(DESC, [1, 2, 4, 6])), local="src")
    )[0] == ("Source block 1 is read 2 times, and 1 more are: is the block table right?")
    large = CacheDesc(4, (16, 64, 8, 128), FP16, kv_tensor_format="NHD")
    assert (
        notes(kvplan.plan(Transfer(Rows(DESC, [5, 2, 9, 1]), Rows(large, [3])), local="dst")) == []
    )  # runs, and no blocks
    assert notes(kvplan.plan(Transfer(Rows(DESC, [1, 1]), Rows(DESC, [2, 3])))) != []
    assert notes(
        kvplan.plan(Transfer(Rows(DESC, [1, 2]), Rows(DESC, [4, 5])), local="dst"),
        notes=["The lease is stale."],
    ) == ["The lease is stale."]


def test_a_comparison_says_what_is_no_longer_so() -> None:
    plan = kvplan.plan(Transfer(Rows(DESC, [4, 5]), Rows(DESC, [7, 8])), local="dst")
    assert notes(PLAN, diff=plan) == [
        "No longer so: Alone: 1 of 2 runs is one block, which has no neighbour at both ends."
    ]


def test_layers_are_counted_that_each_plan_has() -> None:
    one, two, three = (
        kvplan.plan(Transfer(Rows(desc, [4]), Rows(desc, [7])), local="dst")
        for layers in (1, 2, 3)
        for desc in [CacheDesc(2 * layers, (16, 16, 8, 128), FP16, kv_tensor_format="NHD")]
    )

    def alike(plan: Plan, other: Plan | None = None) -> str:
        (picture,) = embedded(plan.to_html(diff=other))
        return str(picture["alike"])

    assert (alike(one), alike(two)) == ("", "same bands in all 2")
    assert alike(two, two) == "same bands in all 2"
    assert alike(one, three) == "same bands in 1 old layer and 3 new layers"


def test_sizes_are_counted() -> None:
    desc = CacheDesc(2, (4096, 16), FP16)
    rows, first = [], 0
    for length in range(1, 40):
        rows += [*range(first, first + length)]
        first += length + 1
    plan = kvplan.plan(Transfer(Rows(desc, rows), Rows(desc, rows)), local="dst")
    sizes = embedded(plan.to_html())[0]["sizes"]
    assert [it[:2] for it in sizes] == [
        ["32 B to 64 B", ["2"]], ["64 B to 128 B", ["4"]], ["128 B to 256 B", ["8"]],
        ["256 B to 512 B", ["16"]], ["512 B to 1 KiB", ["32"]], ["1 KiB to 2 KiB", ["16"]],
    ]  # fmt: skip
    few = embedded(
        PLAN.to_html(
            diff=kvplan.plan(Transfer(Rows(DESC, [5, 4, 9]), Rows(DESC, [7, 8, 2])), local="dst")
        )
    )
    assert few[0]["sizes"] == [
        ["32 KiB", ["4", "12"], [0.3333, 1.0]], ["64 KiB", ["4", "0"], [0.3333, 0.0]]
    ]  # fmt: skip


def test_what_is_not_a_plan_is_refused() -> None:
    with pytest.raises(TypeError, match="diff"):
        PLAN.to_html(diff=joined({"a": PLAN}))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="diff"):
        joined({"a": PLAN}).to_html(diff=PLAN)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="notes"):
        PLAN.to_html(notes=[1])  # type: ignore[list-item]
