"""Rows with gaps between them are described, planned and copied; the gaps keep their content."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import kvplan
from kvplan import CacheDesc, DataType, HostMemory, Plan, Rows, Transfer, execute, reference
from kvplan.execution.binding import bind
from kvplan.planning.side import side
from tests.support.refusals import refused

NHD = "block token head dim"
PAGES, LAYERS, ROW = 6, 3, (4, 2, 8)


def pages(seed: int, *, padding: int = 0) -> np.ndarray:
    """Return pages of all layers: (page, layer, token, head, dim), and the padding behind them."""
    elements = LAYERS * int(np.prod(ROW)) + padding
    return np.random.default_rng(seed).integers(0, 2**16, (PAGES, elements), np.uint16)


def layers(of: np.ndarray) -> list[np.ndarray]:
    """Return a view for each layer, whose rows lie in all pages."""
    size, step = int(np.prod(ROW)), of.strides[0]
    return [
        as_strided(of[:, layer * size :], (PAGES, *ROW), (step, 32, 16, 2))
        for layer in range(LAYERS)
    ]


def desc(**fields: object) -> CacheDesc:
    return CacheDesc(LAYERS, (PAGES, *ROW), DataType.DT_UINT16, kv_tensor_format=NHD, **fields)  # type: ignore[arg-type]


class TestDescriptions:
    def test_from_views_of_pages(self) -> None:
        found = CacheDesc.from_tensors(layers(pages(1, padding=5)), NHD)
        assert (found.shape, found.row_nbytes) == ((PAGES, *ROW), 128)
        assert found.stride == found.row_stride == 3 * 128 + 10
        assert found.tensor_nbytes == 5 * (3 * 128 + 10) + 128
        assert found.rows_nbytes == PAGES * 128

    def test_rows_that_touch_have_no_stride_of_their_own(self) -> None:
        assert desc(row_stride=128) == desc() == desc(row_stride=None)
        assert desc(row_stride=128).row_stride is None

    def test_a_cache_of_one_row_has_no_stride(self) -> None:
        one = np.zeros((4, 2, *ROW), np.uint16)[:1, 0]
        assert CacheDesc.from_tensors([one], NHD).row_stride is None

    def test_rows_of_unknown_layout(self) -> None:
        found = CacheDesc.from_tensors([np.zeros((5, 3, 7), np.uint8)[:, 1]], None)
        assert (found.row_nbytes, found.stride) == (7, 21)

    def test_keys_and_values_outside_of_the_rows(self) -> None:
        both = np.zeros((2, 5, 3, *ROW), np.uint16)[:, :, 1]
        found = CacheDesc.from_tensors([both], f"kv {NHD}")
        assert found.row_stride == 3 * 128
        assert side("cache", found, paged=True).stride_of("kv") == 5 * 3 * 128

    @pytest.mark.parametrize(("stride", "text"), [(127, "127"), (0, "0"), (-1, "-1")])
    def test_overlapping_rows_are_refused(self, stride: int, text: str) -> None:
        with refused("LLM_PARAM_INVALID", rf"row_stride={text} is out of range \[128, "):
            desc(row_stride=stride)

    def test_a_stride_that_no_tensor_has(self) -> None:
        with pytest.raises(ValueError, match="row_stride"):
            desc(row_stride=2**63)
        with refused("LLM_PARAM_INVALID", "bytes a tensor is out of range"):
            desc(row_stride=2**62)
        with pytest.raises(TypeError, match="row_stride"):
            desc(row_stride="128")

    def test_tensors_at_different_distances_are_refused(self) -> None:
        unlike = [layers(pages(1))[0], layers(pages(1, padding=1))[0]]
        with refused("LLM_PARAM_INVALID", r"tensors\[1\] .* distances of their rows differ"):
            CacheDesc.from_tensors(unlike, NHD)

    def test_the_text_names_the_stride(self) -> None:
        assert str(side("cache", desc(row_stride=640), paged=True)).endswith(
            "blocks 640 bytes apart"
        )
        assert "apart" not in str(side("cache", desc(), paged=True))


@pytest.mark.parametrize("padding", [(0, 0), (5, 0), (5, 9)])
@pytest.mark.parametrize("more", [{}, {"num_tokens": 10}, {"coalesce": "caller"}])
def test_blocks_of_layers_that_share_pages(padding: tuple[int, int], more: dict) -> None:
    source, target = pages(1, padding=padding[0]), pages(2, padding=padding[1])
    wanted = target.copy()
    blocks = [4, 1, 2], [0, 5, 3]
    if more.get("coalesce"):
        more = {"coalesce": kvplan.Coalesce.CALLER_ORDER}
    for here, there in zip(layers(source), layers(wanted), strict=True):
        moved = here[blocks[0]].reshape(-1, *ROW[1:])[: more.get("num_tokens", 12)]
        held = there[blocks[1]].reshape(-1, *ROW[1:])
        held[: len(moved)] = moved
        there[blocks[1]] = held.reshape(3, *ROW)
    descs = [CacheDesc.from_tensors(layers(value), NHD) for value in (source, target)]
    transfer = Transfer(Rows(descs[0], blocks[0]), Rows(descs[1], blocks[1]), **more)
    plan = kvplan.plan(transfer, local="dst")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    execute(plan, *(memory(value, d) for value, d in zip((source, target), descs, strict=True)))
    np.testing.assert_array_equal(target, wanted)


def memory(of: np.ndarray, cache: CacheDesc) -> HostMemory:
    addresses = [layer.__array_interface__["data"][0] for layer in layers(of)]
    return HostMemory.from_addresses(cache, addresses, owner=of)


def test_neighbours_are_one_run_only_if_they_touch_on_both_sides() -> None:
    spaced = CacheDesc.from_tensors(layers(pages(1)), NHD)
    for src, dst, runs in ((spaced, desc(), 4), (desc(), spaced, 4), (desc(), desc(), 1)):
        plan = kvplan.plan(Transfer(Rows(src, range(4)), Rows(dst, range(1, 5))), local="dst")
        assert len(plan.part.segments) == runs
        assert plan.nbytes == LAYERS * 4 * 128


def test_layers_of_one_page_do_not_overlap() -> None:
    """The extents of the tensors overlap, but no byte is shared."""
    of = pages(1)
    cache = CacheDesc.from_tensors(layers(of), NHD)
    plan = kvplan.plan(Transfer(Rows(cache, [0, 1]), Rows(cache, [2, 3])), local="both")
    held = memory(of, cache)
    assert len(bind(plan, held, held, one_space=True)) == 2 * LAYERS


def test_tensors_that_share_bytes_are_refused() -> None:
    """The second tensor begins within the first row of the first tensor."""
    of = np.zeros(4096, np.uint8)
    cache = CacheDesc(2, (4, 64), DataType.DT_UINT8, row_stride=256)
    start = of.ctypes.data
    source = HostMemory.from_arrays([np.zeros(cache.tensor_nbytes, np.uint8)] * 2)
    plan = kvplan.plan(Transfer(Rows(cache, [0, 1]), Rows(cache, [2, 3])), local="dst")
    for offset, is_apart in ((64, True), (192, True), (63, False), (193, False), (256, False)):
        target = HostMemory.from_addresses(cache, [start, start + offset], owner=of)
        if is_apart:
            assert len(bind(plan, source, target, one_space=True)) == 4
        else:
            with refused("LLM_PARAM_INVALID", "dst tensors overlap in memory"):
                bind(plan, source, target, one_space=True)


class TestDocuments:
    """Plan files are checked: no run may leave its row."""

    @pytest.fixture
    def document(self) -> dict:
        cache = desc(row_stride=640)
        plan = kvplan.plan(Transfer(Rows(cache, [1]), Rows(cache, [2])), local="dst")
        found: dict = json.loads(json.dumps(plan.to_dict()))
        return found

    @pytest.mark.parametrize(("nbytes", "offset"), [(129, 640), (128, 641), (1, 640 + 128)])
    def test_a_run_beyond_its_row_is_refused(
        self, document: dict, nbytes: int, offset: int
    ) -> None:
        segments = document["parts"][0]["segments"]
        segments["nbytes"], segments["src_offsets"] = [nbytes], [offset]
        with refused("LLM_PARAM_INVALID", "leave the block that they begin in, of 128 bytes"):
            Plan.from_dict(document)

    def test_a_stride_below_the_row_is_refused(self, document: dict) -> None:
        document["parts"][0]["src"]["stride"] = 127
        with refused("LLM_PARAM_INVALID", "row_stride=127 is out of range"):
            Plan.from_dict(document)


def test_a_slot_is_copied_within_its_row() -> None:
    """Offsets and sizes of slots count bytes of the row, not of the gap."""
    cache = desc(row_stride=640)
    slots = Transfer(Rows(cache, slot=1, offset=8), Rows(cache, slot=3, offset=8), nbytes=120)
    (run,) = kvplan.plan(slots, local="dst").part.segments
    assert run == (648, 3 * 640 + 8, 120)
    for nbytes in (121, 500):
        with refused("LLM_PARAM_INVALID", f"nbytes={nbytes}: .* of the src row of 128 bytes"):
            kvplan.plan(
                Transfer(Rows(cache, slot=1, offset=8), Rows(cache, slot=3), nbytes=nbytes),
                local="dst",
            )


def test_a_slot_is_cut_into_blocks() -> None:
    slots = CacheDesc(1, (3, 256), DataType.DT_UINT8, row_stride=300)
    blocks = CacheDesc(1, (8, 64), DataType.DT_UINT8, row_stride=100)
    source, target = (
        np.random.default_rng(number).integers(0, 255, 900, np.uint8) for number in (1, 2)
    )
    wanted = target.copy()
    for piece, block in enumerate((7, 0, 3, 5)):
        wanted[block * 100 : block * 100 + 64] = source[300 + piece * 64 : 364 + piece * 64]
    plan = kvplan.plan(
        Transfer(Rows(slots, slot=1), Rows(blocks, [7, 0, 3, 5]), reinterpret=True), local="dst"
    )
    span = slots.tensor_nbytes, blocks.tensor_nbytes
    reference.execute(plan, [source[: span[0]]], [target[: span[1]]])
    np.testing.assert_array_equal(target, wanted)


def test_repeated_runs_may_end_where_their_rows_end() -> None:
    """A run may be the last bytes of a row, followed by the first bytes of the next row."""
    desc = CacheDesc(1, (4, 12), DataType.DT_INT8, row_stride=16)
    document = kvplan.plan(Transfer(Rows(desc, [0, 1]), Rows(desc, [0, 1])), local="dst").to_dict()
    (part,) = document["parts"]
    part["num_slices"] = 2
    part["segments"] = {
        "src_offsets": [8], "dst_offsets": [8], "nbytes": [4], "repeats": [[[2], 8, 8]],
    }  # fmt: skip
    assert [*Plan.from_dict(document).part.segments.expanded()] == [(8, 8, 4), (16, 16, 4)]
    part["segments"]["nbytes"] = [5]
    with refused("LLM_PARAM_INVALID", "leave the block that they begin in"):
        Plan.from_dict(document)
