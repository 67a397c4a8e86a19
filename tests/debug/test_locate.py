"""`locate` describes wrong bytes as they were made wrong, by the names of axes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, DataType, Plan, Rows, Transfer, reference
from kvplan.debug import locate, replay
from tests.planning.test_unlike import planned, transfers
from tests.planning.unlike import expected

NHD = CacheDesc(4, (32, 16, 4, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")
SRC, DST = [3, 4, 9, 12, 13], [7, 8, 2, 20, 21]


def filled(desc: CacheDesc, seed: int) -> list[Any]:
    """Return tensors whose cells are all different."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(desc.shape).astype(np.float16) for _ in range(desc.num_tensors)]


def moved(plan: Any, source: list[Any], target: list[Any]) -> list[Any]:
    """Return the destination after the plan was executed."""
    result = [item.copy() for item in target]
    reference.execute(plan, source, result)
    return result


@given(transfers(), st.data())
def test_a_wrong_cell_is_found(transfer: Any, data: st.DataObject) -> None:
    src, dst, src_blocks, dst_blocks, src_token, dst_token, num_tokens = transfer
    plan = planned(transfer, data.draw(st.booleans()))
    source, target = src.tensors(1), dst.tensors(2)
    right = expected(src, dst, source, target, *transfer[2:])
    layer = data.draw(st.sampled_from([layer for layer in src.layers if layer in dst.layers]))
    kv = data.draw(st.integers(0, src.model.kv - 1))
    head = data.draw(st.sampled_from([head for head in src.heads if head in dst.heads]))
    token = data.draw(st.integers(0, num_tokens - 1))
    there, inside = divmod(dst_token + token, dst.tokens)
    found = [item.copy() for item in right]
    cell = dst.named(found, layer, kv)[dst_blocks[there], inside, head - dst.heads.start]
    cell ^= 1
    result = locate(right, found, plan, source=source)
    assert result.differences[0].elsewhere_nbytes == 0
    assert result.differences[0].layers == (layer,)
    first = result.first
    assert first is not None
    assert (first.layer, first.row) == (layer, dst_blocks[there])
    assert first.kv in ("", "KV"[kv])
    assert first.heads in (None, (head, head))
    assert first.tokens in (None, (src_token + token,) * 2)
    from_entry = (src_token + token) // src.tokens
    assert (first.src_row, first.entries) == (src_blocks[from_entry], (from_entry,))
    origin = plan.origin(first.descriptor)
    assert (origin.src_tensor, origin.dst_tensor) == (first.src_tensor, first.tensor)
    assert origin.model_layer is not None
    assert layer in range(origin.model_layer, origin.model_layer + origin.num_layers)
    assert first.as_planned is False
    # The source is enough to find the cell, and its other destinations are not mentioned.
    again = replay(plan, source, found)
    assert again.first is not None
    assert (again.first.row, again.first.tokens) == (first.row, first.tokens)
    as_planned = replay(plan, source, right)
    assert not as_planned
    assert str(as_planned).splitlines()[1:] == [
        "  everything was copied as planned: if the cache is wrong, the source, or the plan, "
        "was wrong"
    ]


@given(transfers(), st.booleans())
def test_bytes_that_the_plan_does_not_write_are_counted_apart(
    transfer: Any, coalesce: bool
) -> None:
    src, dst, *arguments = transfer
    plan = planned(transfer, coalesce)
    source = src.tensors(1)
    one, other = (expected(src, dst, source, dst.tensors(seed), *arguments) for seed in (2, 3))
    same, total = (
        sum(int(fold(a == b)) for a, b in zip(one, other, strict=True))
        for fold in (np.count_nonzero, np.size)
    )
    (difference,) = locate(one, other, plan).differences
    assert difference.first is None
    # Cells are counted whole; if one element is equal by chance, the others are, too.
    assert difference.elsewhere_nbytes >= (total - same) * one[0].itemsize
    assert difference.elsewhere_nbytes <= total * one[0].itemsize - plan.nbytes


def test_a_wrong_block_id_is_explained() -> None:
    source, empty = filled(NHD, 1), [np.zeros(NHD.shape, np.float16)] * 4
    right = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    wrong = kvplan.plan(Transfer(Rows(NHD, [3, 4, 12, 12, 13]), Rows(NHD, DST)), local="dst")
    result = locate(moved(right, source, empty), moved(wrong, source, empty), wrong, source=source)
    assert result
    assert str(result) == "\n".join(
        [
            f"wrong: 4 KiB of the 20 KiB that pull_blocks (plan {wrong.fingerprint[:6]}) writes",
            "  layers 0..1, K+V, heads 0..3, tokens 32..47, block 2 at dst",
            "first: layer 0, K, heads 0..3, tokens 32..47, block 2 of dst tensor 0",
            "  descriptor 1 wrote it, from block 12 of src tensor 0, "
            "src_blocks[2] and src_blocks[3]",
            "  block 12 is in the block table more than once",
            "  it holds what is expected of tokens 48..63, in block 20",
            "  the source holds the same there: it was copied as planned, so the source, or the "
            "plan, was wrong",
        ]
    )


def test_each_side_is_shown_by_its_name_and_up_to_four_entries() -> None:
    """Observed programs name their memory."""
    source = filled(NHD, 1)
    plan = kvplan.plan(Transfer(Rows(NHD, [3] * 5), Rows(NHD, DST)), local="dst")
    src, dst = (
        replace(side, name=name) for side, name in ((plan.part.src, "s"), (plan.part.dst, "d"))
    )
    named = Plan([replace(plan.part, src=src, dst=dst)])
    right = moved(plan, source, [np.zeros(NHD.shape, np.float16)] * 4)
    found = [item.copy() for item in right]
    found[0][DST[0]] += 1
    lines = str(locate(right, found, named)).splitlines()
    assert lines[2] == "first: layer 0, K, heads 0..3, tokens 0..15, block 7 of d"
    entries = " and ".join(f"src_blocks[{entry}]" for entry in range(4))
    assert lines[3].endswith(f"wrote it, from block 3 of s, {entries}")


def one_wrong(change: Any) -> Any:
    """Return the first wrong place after a change of block 8 of layer 1, tokens 16 to 31, in V."""
    source = filled(NHD, 1)
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    right = moved(plan, source, [np.zeros(NHD.shape, np.float16)] * 4)
    found = [item.copy() for item in right]
    change(found[3][8], right, source)
    result = locate(right, found, plan, source=source)
    assert result.first is not None
    assert result.first.tensor == 3
    assert result.first.row == 8
    assert ("it holds" in str(result)) is bool(result.first.holds)
    return result.first


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        (lambda row, right, source: row.fill(0), "zeros, as if nothing was ever written there"),
        (lambda row, right, source: row.view(np.uint8).fill(255), "0xff alone"),
        (
            lambda row, right, source: np.copyto(row, right[3][21]),
            "what is expected of tokens 64..79, in block 21",
        ),
        (
            lambda row, right, source: np.copyto(row[1:], right[3][8][:-1]),
            "what is expected of tokens 16..30, in block 8",
        ),
        (
            lambda row, right, source: np.copyto(row[:, 2], right[3][8][:, 0]),
            "what is expected of head 0",
        ),
        (
            lambda row, right, source: np.copyto(row[:, 0], right[3][8][:, -1]),
            "what is expected of head 3",
        ),
        (
            lambda row, right, source: np.copyto(row, right[0][8]),
            "what is expected of layer 0 K",
        ),
        (
            lambda row, right, source: np.copyto(row, source[3][30]),
            "what lies in block 30 at the source, not of this request",
        ),
        (lambda row, right, source: row.view(np.uint16).__ixor__(1), ""),
    ],
    ids=["empty", "filled", "block", "token", "head", "last", "layer", "other", "flipped"],
)
def test_the_owner_of_wrong_bytes_is_recognized(change: Any, holds: str) -> None:
    first = one_wrong(change)
    assert first.holds == holds
    assert first.as_planned is False
    assert (first.layer, first.kv) == (1, "V")


def test_zeros_that_the_source_lacks_may_be_uncopied() -> None:
    source, empty = filled(NHD, 1), [np.zeros(NHD.shape, np.float16)] * 4
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    text = str(locate(moved(plan, source, empty), empty, plan, source=source))
    assert "it holds zeros, as if nothing was ever written there" in text
    assert "so it was not copied, was cleared later, or the source has changed since" in text
    assert "another transfer wrote it" not in text


def test_an_equal_cache_is_not_called_a_replay() -> None:
    source = filled(NHD, 1)
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    right = moved(plan, source, [np.zeros(NHD.shape, np.float16)] * 4)
    name = f"pull_blocks (plan {plan.fingerprint[:6]})"
    assert str(locate(right, right, plan)) == f"as expected: all 20 KiB that {name} writes"


def test_bytes_that_the_source_lacks_may_be_of_another_transfer() -> None:
    source = filled(NHD, 1)
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    right = moved(plan, source, [np.zeros(NHD.shape, np.float16)] * 4)
    found = [item.copy() for item in right]
    found[0][7] = source[0][30]
    text = str(locate(right, found, plan, source=source))
    assert "so another transfer wrote it, or the source has changed since" in text
    assert "not copied" not in text


@pytest.mark.parametrize("atol", [0, 0.01])
@pytest.mark.parametrize("element", [0, 3, 4, 7])
def test_every_element_of_a_cell_is_compared(element: int, atol: float) -> None:
    source = filled(NHD, 1)
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    right = moved(plan, source, [np.zeros(NHD.shape, np.float16)] * 4)
    found = [item.copy() for item in right]
    found[1][7, 2, 3, element] += 1
    result = locate(right, found, plan, atol=atol)
    assert result.first is not None
    assert (result.first.heads, result.first.tokens) == ((3, 3), (2, 2))


def test_zeros_of_the_source_were_copied() -> None:
    """Prefill has not computed the block yet, so the transfer is not at fault."""
    source, empty = filled(NHD, 1), [np.zeros(NHD.shape, np.float16)] * 4
    plan = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    right = moved(plan, source, empty)
    source[2][9] = 0
    first = locate(right, moved(plan, source, empty), plan, source=source).first
    assert first is not None
    assert (first.row, first.holds, first.as_planned) == (2, "zeros", True)


@pytest.mark.parametrize("block", [16, 17])
def test_another_block_of_the_source_is_found_beyond_the_first_chunk(block: int) -> None:
    """`locate` reads 16 MiB at a time, and the block of the plan is not among them."""
    source, right, found = (np.zeros((count, 1, 1 << 20), np.uint8) for count in (19, 1, 1))
    source[:, 0, 1] = np.arange(1, 20)
    right[0], found[0] = source[0], source[block]
    from_, to = (
        CacheDesc(1, array.shape, DataType.DT_UINT8, kv_tensor_format="block token dim")
        for array in (source, right)
    )
    plan = kvplan.plan(Transfer(Rows(from_, [0]), Rows(to, [0])), local="dst")
    first = locate([right], [found], plan, source=[source]).first
    assert first is not None
    assert first.holds == f"what lies in block {block} at the source, not of this request"


@pytest.mark.parametrize("block", [15, 16, 17])
def test_content_of_the_request_is_found_beyond_the_first_chunk(block: int) -> None:
    """`locate` searches 16 MiB at a time, and a token has one."""
    right = np.zeros((18, 1, 1 << 20), np.uint8)
    right[:, 0, 1] = np.arange(1, 19)
    found = right.copy()
    found[0] = right[block]
    desc = CacheDesc(1, right.shape, DataType.DT_UINT8, kv_tensor_format="block token dim")
    plan = kvplan.plan(Transfer(Rows(desc, range(18)), Rows(desc, range(18))), local="dst")
    first = locate([right], [found], plan).first
    assert first is not None
    assert first.holds == f"what is expected of token {block}, in block {block}"


@pytest.mark.parametrize("kv", [0, 1])
def test_another_block_of_the_source_is_found_if_values_lie_behind_all_keys(kv: int) -> None:
    desc = CacheDesc(
        1, (2, 8, 4, 2, 8), DataType.DT_FLOAT16, kv_tensor_format="kv block token head dim"
    )
    source = filled(desc, 1)
    plan = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [5])), local="dst")
    found = moved(plan, source, [np.zeros(desc.shape, np.float16)])
    found[0][kv, 5] = source[0][kv, 6]
    first = replay(plan, source, found).first
    assert first is not None
    assert (first.kv, first.row) == ("KV"[kv], 5)
    assert first.holds == "what lies in block 6 at the source, not of this request"


def test_cells_that_do_not_divide_the_compared_chunks() -> None:
    """A cell of MLA has 1152 bytes, of which no multiple is 16 MiB: look at both sides of a cut."""
    desc = CacheDesc(1, (1000, 16, 576), DataType.DT_FLOAT16, kv_tensor_format="block token dim")
    plan = kvplan.plan(Transfer(Rows(desc, [0]), Rows(desc, [0])), local="dst")
    whole = kvplan.plan(Transfer(Rows(desc, range(1000)), Rows(desc, range(1000))), local="dst")
    right, found = np.zeros(desc.shape, np.uint16), np.zeros(desc.shape, np.uint16)
    cells = found.reshape(-1, 576)
    cut = (16 << 20) // 1152
    cells[[cut - 1, cut, -1]] = 1
    assert [*locate([right], [found], whole).differences[0].tokens] == [
        (cut - 1, cut), (15999, 15999)
    ]  # fmt: skip
    assert locate([right], [found], plan).differences[0].elsewhere_nbytes == 3 * 1152


def test_a_block_that_is_partly_right_was_not_copied_as_planned() -> None:
    """The plan is wrong, and a later transfer wrote the last tokens of the same block."""
    source, empty = filled(NHD, 1), [np.zeros(NHD.shape, np.float16)] * 4
    right = kvplan.plan(Transfer(Rows(NHD, SRC), Rows(NHD, DST)), local="dst")
    wrong = kvplan.plan(Transfer(Rows(NHD, [5, 4, 9, 12, 13]), Rows(NHD, DST)), local="dst")
    found = moved(wrong, source, empty)
    found[0][7, 12:] = source[0][6, 12:]
    first = locate(moved(right, source, empty), found, wrong, source=source).first
    assert first is not None
    assert (first.row, first.tokens, first.holds) == (7, (0, 15), "")
    assert first.as_planned is False


def test_all_bytes_are_compared_with_the_named_block() -> None:
    """Blocks of one template begin alike, so comparing the first head is not enough."""

    def change(row: Any, right: Any, source: Any) -> None:
        source[3][29, 0] = source[3][30, 0]
        np.copyto(row, source[3][30])

    assert one_wrong(change).holds == "what lies in block 30 at the source, not of this request"


def test_bytes_behind_the_last_token_are_not_part_of_the_request() -> None:
    source = filled(NHD, 1)
    plan = kvplan.plan(
        Transfer(Rows(NHD, [3, 4], first_token=4), Rows(NHD, [7, 8], first_token=4), num_tokens=18),
        local="dst",
    )
    target = filled(NHD, 2)
    right = moved(plan, source, target)
    for token in (3, 16 + 6):  # the last one before the request, and the first one behind it
        found = [item.copy() for item in right]
        found[0][7, 5] = right[0][[7, 8][token // 16], token % 16]
        first = locate(right, found, plan).first
        assert first is not None
        assert (first.tokens, first.holds) == ((5, 5), "")


@pytest.mark.parametrize(("first", "into"), [(4, 0), (0, 4), (20, 3), (5, 5)])
def test_tokens_are_numbered_in_the_request(first: int, into: int) -> None:
    """The source has skipped `first` tokens, and the destination has skipped `into`."""
    source = filled(NHD, 1)
    blocks = Rows(NHD, SRC, first_token=first), Rows(NHD, DST, first_token=into)
    plan = kvplan.plan(Transfer(*blocks, num_tokens=40), local="dst")
    right = moved(plan, source, filled(NHD, 2))
    found = [item.copy() for item in right]
    for token, other in ((into + 7, into + 25), (into + 30, into + 2)):
        there = [(DST[at // 16], at % 16) for at in (token, other)]
        found[2][there[0]] = right[2][there[1]]
        result = locate(right, found, plan, source=source).first
        assert result is not None
        assert result.tokens == (token - into + first,) * 2
        assert result.holds == f"what is expected of token {other - into + first}, in block " + str(
            there[1][0]
        )
        found[2][there[0]] = right[2][there[0]]


def from_small_blocks() -> tuple[Plan, list[Any], list[Any]]:
    """Four small blocks make a large one: return the plan, the source, and the right result."""
    small = CacheDesc(4, (32, 4, 4, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")
    source = filled(small, 1)
    plan = kvplan.plan(Transfer(Rows(small, [3, 9, 12, 5]), Rows(NHD, [7])), local="dst")
    return plan, source, moved(plan, source, filled(NHD, 2))


def test_bytes_of_several_source_blocks_are_not_searched_in_another() -> None:
    """The first of four blocks holds the last one of the source; no block follows that."""
    plan, source, right = from_small_blocks()
    found = [item.copy() for item in right]
    found[1][7, :4] = source[1][31]
    found[1][7, 4:] += 1
    result = locate(right, found, plan, source=source).first
    assert result is not None
    assert (result.as_planned, result.holds) == (False, "")


def test_the_first_wrong_token_of_any_head_is_described() -> None:
    """The place has a descriptor and a source, although small source blocks make a large one."""
    plan, source, right = from_small_blocks()
    found = [item.copy() for item in right]
    for token, head in ((13, 0), (9, 1), (2, 3), (6, 2)):
        found[1][7, token, head] += 1
        result = locate(right, found, plan, source=source).first
        assert result is not None
        first = min(
            number for number in (13, 9, 2, 6) if (found[1][7, number] != right[1][7, number]).any()
        )
        assert (result.src_row, result.entries) == ([3, 9, 12, 5][first // 4], (first // 4,))
        assert plan.origin(result.descriptor).src_rows[0] == result.src_row


@pytest.mark.parametrize("name", ["DT_FLOAT16", "DT_FLOAT", "DT_DOUBLE"])
def test_only_a_nan_at_both_ends_is_equal(name: str) -> None:
    desc = CacheDesc(2, (8, 4, 2, 3), DataType[name], kv_tensor_format="NHD")
    plan = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [5])), local="dst")
    kind = {"DT_FLOAT16": np.float16, "DT_FLOAT": np.float32, "DT_DOUBLE": np.float64}[name]
    for left, right, alike in (
        (np.nan, np.nan, True),
        (np.nan, -np.nan, True),  # other bits, as from another method of computation
        (np.nan, 1.0, False),
        (1.0, np.nan, False),
        (np.inf, np.inf, True),
        (np.inf, -np.inf, False),
        (np.inf, np.nan, False),
    ):
        one = [np.ones(desc.shape, kind) for _ in range(2)]
        other = [np.ones(desc.shape, kind) for _ in range(2)]
        one[1][5, 2, 1, 0], other[1][5, 2, 1, 0] = left, right
        assert (not locate(one, other, plan, atol=1e-3)) is alike


def test_tensors_of_a_layer_without_names_have_numbers() -> None:
    desc = CacheDesc(4, (8, 64), DataType.DT_FLOAT16)
    source = filled(desc, 1)
    plan = kvplan.plan(Transfer(Rows(desc, [1, 2]), Rows(desc, [5, 6])), local="dst")
    found = moved(plan, source, [np.zeros(desc.shape, np.float16)] * 4)
    found[1][5] = found[0][5]
    first = replay(plan, source, found).first
    assert first is not None
    assert (first.layer, first.tensor, first.row) == (0, 1, 5)
    assert first.holds == "what is expected of layer 0, in dst tensor 0"


def test_heads_that_share_a_byte_are_not_named() -> None:
    """Elements have 4 bits, so two heads share a byte, but the token is found."""
    desc = CacheDesc(2, (8, 4, 2, 3), DataType.DT_INT4, kv_tensor_format="NHD")
    source = [np.arange(96, dtype=np.uint8) + tensor for tensor in range(2)]
    plan = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [5])), local="dst")
    found = moved(plan, source, [np.zeros(96, np.uint8)] * 2)
    found[1][5 * 12 + 3 * 2] += 100
    first = replay(plan, source, found).first
    assert first is not None
    assert (first.kv, first.heads, first.tokens, first.row) == ("V", None, (2, 2), 5)
    assert first.holds == ""  # every byte has a single value


def test_memory_is_at_most_a_few_bytes_per_element() -> None:
    """If tokens are innermost, each element is compared separately."""
    desc = CacheDesc(
        2, (128, 4, 64, 32), DataType.DT_FLOAT16, kv_tensor_format="block head dim token"
    )
    source = filled(desc, 1)
    plan = kvplan.plan(Transfer(Rows(desc, range(60)), Rows(desc, range(60, 120))), local="dst")
    right = moved(plan, source, [np.zeros(desc.shape, np.float16)] * 2)
    found = [item.copy() for item in right]
    found[1][100, 3, 60, 30] = 7
    tracemalloc.start()
    try:
        result = locate(right, found, plan)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.first is not None
    assert (result.first.heads, result.first.row) == ((3, 3), 100)
    assert peak < 8 * source[0].size


def test_content_is_not_searched_along_axes_whose_steps_are_parts_of_bytes() -> None:
    """Elements of 4 bits: the three layers of a token are one and a half bytes."""
    desc = CacheDesc(1, (1, 2, 3), DataType.DT_INT4, kv_tensor_format="block token layer")
    plan = kvplan.plan(Transfer(Rows(desc, [0]), Rows(desc, [0])), local="dst")
    found = locate([np.zeros(3, np.uint8)], [np.array([2, 1, 2], np.uint8)], plan)
    assert found.first is not None
    assert (found.first.holds, found.differences[0].wrong_nbytes) == ("", 3)


def test_content_is_found_in_other_blocks_and_tensors_if_elements_share_bytes() -> None:
    """Elements of 4 bits: neither a token nor a layer is a number of bytes."""
    for format_, shape, place, holds in (
        ("block token dim", (8, 4, 1), (0, 4), "what is expected in block 4"),
        ("block token layer dim", (8, 4, 2, 1), (1, 3), "what is expected of layer 2"),
    ):
        desc = CacheDesc(2, shape, DataType.DT_INT4, kv_tensor_format=format_)
        plan = kvplan.plan(Transfer(Rows(desc, [0, 1]), Rows(desc, [3, 4])), local="dst")
        size = plan.parts[0].dst.tensor_nbytes
        expected = [np.arange(size, dtype=np.uint8).reshape(8, -1) + i * size for i in range(2)]
        found = [tensor.copy() for tensor in expected]
        found[0][3] = expected[place[0]][place[1]]
        first = locate(expected, found, plan).first
        assert first is not None
        assert first.holds == holds, format_
