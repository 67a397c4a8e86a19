"""The rules of the reference, each in an example small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    DataType,
    KvCacheExtParam,
    LLMException,
    Placement,
    Plan,
    RemoteCache,
    Rows,
    Transfer,
)

SLOTS = CacheDesc(4, (3, 16), DataType.DT_INT8)
SMALL = CacheDesc(4, (3, 10), DataType.DT_INT8)
BLOCKS = CacheDesc(4, (8, 4), DataType.DT_INT8)


def segments(plan: Plan) -> list[tuple[int, int, int]]:
    return list(plan.part.segments)


def tensor_pairs(plan: Plan) -> list[tuple[int, int]]:
    return list(zip(plan.part.src_tensors, plan.part.dst_tensors, strict=True))


def layered(num_tensors: int, ext_param: KvCacheExtParam) -> Plan:
    desc = CacheDesc(num_tensors, (8, 4), DataType.DT_INT8)
    return kvplan.plan(Transfer(Rows(desc, [0]), Rows(desc, [1]), layers=ext_param), local="dst")


class TestSize:
    def test_minus_one_pulls_one_destination_row(self) -> None:
        plan = kvplan.plan(Transfer(Rows(SLOTS, slot=1), Rows(SMALL, slot=2)), local="dst")
        assert segments(plan) == [(16, 20, 10)]

    def test_minus_one_pushes_and_copies_one_source_row(self) -> None:
        for local in ("src", "both"):
            plan = kvplan.plan(Transfer(Rows(SMALL, slot=2), Rows(SLOTS, slot=1)), local=local)
            assert segments(plan) == [(20, 16, 10)]

    def test_minus_one_never_means_less_than_the_local_row(self) -> None:
        with pytest.raises(LLMException, match=r"10 bytes|16 bytes"):
            kvplan.plan(Transfer(Rows(SMALL), Rows(SLOTS)), local="dst")
        with pytest.raises(LLMException, match="16 bytes"):
            kvplan.plan(Transfer(Rows(SLOTS), Rows(SMALL)), local="src")

    @pytest.mark.parametrize("size", [1, 9, 10])
    def test_a_size_may_be_a_part_of_a_row_or_all_of_it(self, size: int) -> None:
        assert segments(
            kvplan.plan(Transfer(Rows(SLOTS), Rows(SMALL), nbytes=size), local="dst")
        ) == [(0, 0, size)]

    def test_minus_one_is_the_rest_after_the_offset(self) -> None:
        plan = kvplan.plan(Transfer(Rows(SLOTS, offset=9), Rows(SMALL, offset=3)), local="dst")
        assert segments(plan) == [(9, 3, 7)]
        plan = kvplan.plan(Transfer(Rows(SMALL, offset=9), Rows(SLOTS, offset=3)), local="src")
        assert segments(plan) == [(9, 3, 1)]

    def test_the_offset_of_a_copy_is_on_both_sides(self) -> None:
        plan = kvplan.plan(Transfer(Rows(SLOTS, offset=12), Rows(SLOTS, slot=2, offset=12)))
        assert segments(plan) == [(12, 44, 4)]
        plan = kvplan.plan(
            Transfer(Rows(SLOTS, offset=12), Rows(SLOTS, slot=2, offset=12), nbytes=3)
        )
        assert segments(plan) == [(12, 44, 3)]

    def test_the_last_byte_of_the_last_row_can_be_copied(self) -> None:
        plan = kvplan.plan(
            Transfer(Rows(SLOTS, slot=2, offset=15), Rows(SLOTS, slot=2, offset=15), nbytes=1)
        )
        assert segments(plan) == [(47, 47, 1)]


class TestSlotToBlocks:
    def test_chunk_i_goes_to_block_i(self) -> None:
        plan = kvplan.plan(Transfer(Rows(SLOTS, slot=1), Rows(BLOCKS, [7, 0, 3])), local="dst")
        assert (plan.kind, segments(plan)) == ("C2B", [(16, 28, 4), (20, 0, 4), (24, 12, 4)])

    def test_the_last_chunk_ends_with_the_row(self) -> None:
        plan = kvplan.plan(Transfer(Rows(SMALL, (), slot=2), Rows(BLOCKS, [7, 0, 3])), local="src")
        assert segments(plan) == [(20, 28, 4), (24, 0, 4), (28, 12, 2)]

    def test_a_row_smaller_than_a_block_fills_its_beginning(self) -> None:
        tiny = CacheDesc(4, (3, 3), DataType.DT_INT8)
        plan = kvplan.plan(Transfer(Rows(tiny, slot=1), Rows(BLOCKS, [5])), local="dst")
        assert segments(plan) == [(3, 20, 3)]

    def test_chunks_merge_where_blocks_are_neighbours(self) -> None:
        plan = kvplan.plan(Transfer(Rows(SMALL), Rows(BLOCKS, [4, 5, 6])), local="dst")
        assert segments(plan) == [(0, 16, 10)]
        assert (plan.part.num_slices, plan.nbytes) == (3, 40)


class TestBlocks:
    def test_block_i_goes_to_block_i(self) -> None:
        plan = kvplan.plan(
            Transfer(Rows(BLOCKS, [6, 1]), Rows(BLOCKS, [0, 5]), coalesce=False), local="dst"
        )
        assert segments(plan) == [(24, 0, 4), (4, 20, 4)]

    def test_one_block_can_be_read_many_times(self) -> None:
        plan = kvplan.plan(Transfer(Rows(BLOCKS, [6, 6, 6]), Rows(BLOCKS, [0, 5, 1])), local="dst")
        assert segments(plan) == [(24, 0, 4), (24, 4, 4), (24, 20, 4)]

    def test_caches_may_have_different_numbers_of_blocks(self) -> None:
        other = CacheDesc(4, (1, 2, 4), DataType.DT_INT8, batch_dim_index=1)
        assert segments(
            kvplan.plan(Transfer(Rows(BLOCKS, [7]), Rows(other, [1])), local="src")
        ) == [(28, 4, 4)]

    def test_blocks_of_another_shape_are_copied_as_bytes_on_request(self) -> None:
        other = CacheDesc(4, (2, 1, 2), DataType.DT_FLOAT16)
        with pytest.raises(LLMException, match="reinterpret=True"):
            kvplan.plan(Transfer(Rows(BLOCKS, [7]), Rows(other, [1])), local="src")
        plan = kvplan.plan(
            Transfer(Rows(BLOCKS, [7]), Rows(other, [1]), reinterpret=True), local="src"
        )
        assert segments(plan) == [(28, 4, 4)]

    def test_a_copy_fans_out(self) -> None:
        plan = kvplan.plan(Transfer(Rows(BLOCKS, [0, 0, 4]), Rows(BLOCKS, [1, 2, 6])))
        assert segments(plan) == [(0, 4, 4), (0, 8, 4), (16, 24, 4)]

    def test_a_block_may_be_copied_to_itself(self) -> None:
        assert segments(kvplan.plan(Transfer(Rows(BLOCKS, [3, 3]), Rows(BLOCKS, [3, 5])))) == [
            (12, 12, 4),
            (12, 20, 4),
        ]

    def test_between_two_caches_any_block_may_be_written(self) -> None:
        target = CacheDesc(4, (8, 4), DataType.DT_INT8)
        for dst in (target, Cache(target, 2)):
            plan = kvplan.plan(Transfer(Rows(Cache(BLOCKS, 1), [0, 1]), Rows(dst, [1, 0])))
            assert segments(plan) == [(0, 4, 4), (4, 0, 4)]

    def test_an_unregistered_cache_has_no_id_to_share(self) -> None:
        assert (
            kvplan.plan(Transfer(Rows(Cache(BLOCKS), [0, 1]), Rows(Cache(BLOCKS), [1, 0]))).nbytes
            == 32
        )

    @pytest.mark.parametrize("inward", [True, False])
    def test_a_swap_goes_in_or_out(self, inward: bool) -> None:
        host = CacheDesc(4, (5, 4), DataType.DT_INT8, Placement.HOST)
        src, dst = (host, BLOCKS) if inward else (BLOCKS, host)
        assert segments(kvplan.plan(Transfer(Rows(src, [4]), Rows(dst, [1])))) == [(16, 4, 4)]


class TestLayers:
    @pytest.mark.parametrize(
        ("src", "dst"),
        [
            (range(1, 3), range(2)),
            ((1, 2), (0, 1)),
            (range(1, 3), (0, 1)),
            ((1, 2), range(2)),
            ([1, 2], [0, 1]),
        ],
    )
    def test_a_python_range_and_an_inclusive_pair_are_the_same(self, src, dst) -> None:  # type: ignore[no-untyped-def]
        plan = layered(6, KvCacheExtParam(src, dst))
        assert tensor_pairs(plan) == [(2, 0), (3, 1), (4, 2), (5, 3)]

    @pytest.mark.parametrize("everything", [None, (-1, -1)])
    def test_all_layers(self, everything: tuple[int, int] | None) -> None:
        plan = layered(6, KvCacheExtParam(everything, everything))
        assert tensor_pairs(plan) == [(i, i) for i in range(6)]
        assert plan == layered(6, KvCacheExtParam())

    def test_one_range_is_enough_if_it_is_all_layers(self) -> None:
        for ext_param in (KvCacheExtParam(range(3)), KvCacheExtParam(None, (0, 2))):
            assert layered(6, ext_param) == layered(6, KvCacheExtParam())

    def test_one_range_is_enough_for_a_cache_of_as_many_layers(self) -> None:
        few, many = (CacheDesc(n, (8, 4), DataType.DT_INT8) for n in (4, 8))
        plan = kvplan.plan(
            Transfer(
                Rows(many, [0]), Rows(few, [0]), layers=KvCacheExtParam(src_layer_range=range(2, 4))
            ),
            local="dst",
        )
        assert tensor_pairs(plan) == [(4, 0), (5, 1), (6, 2), (7, 3)]

    @pytest.mark.parametrize(
        ("num_tensors", "layers"),
        [(1, [1]), (2, [2]), (3, [1] * 3), (5, [1] * 5), (6, [2, 2, 2]), (27, [1] * 27)],
    )
    def test_without_a_range_a_layer_is_two_tensors_if_they_divide(
        self, num_tensors: int, layers: list[int]
    ) -> None:
        plan = layered(num_tensors, KvCacheExtParam())
        assert tensor_pairs(plan) == [(i, i) for i in range(num_tensors)]
        assert [len(layer.tensors) for layer in plan.part.layers] == layers

    @pytest.mark.parametrize("num_tensors", [3, 5])
    def test_with_a_range_two_must_divide_the_tensors(self, num_tensors: int) -> None:
        for ranges in ((range(1), range(1)), (range(1), None), (None, (0, 0))):
            with pytest.raises(LLMException, match=rf"must divide the {num_tensors} tensors"):
                layered(num_tensors, KvCacheExtParam(*ranges))
        assert len(layered(num_tensors, KvCacheExtParam(None, None, 1)).part.layers) == num_tensors
        assert len(layered(num_tensors, KvCacheExtParam(None, None, num_tensors)).part.layers) == 1

    @pytest.mark.parametrize("per_layer", [1, 2, 3, 6])
    def test_layer_l_is_the_tensors_from_l_times_t(self, per_layer: int) -> None:
        last = 6 // per_layer - 1
        plan = layered(6, KvCacheExtParam((last, last), (0, 0), per_layer))
        assert list(plan.part.src_tensors) == list(range(last * per_layer, 6))
        assert list(plan.part.dst_tensors) == list(range(per_layer))

    def test_the_example_of_the_reference(self) -> None:
        """PushKvCache: 4 tensors of (4, 16) int32, slot 3, layers 3 to 3, one tensor per layer."""
        desc = CacheDesc(4, (4, 16), DataType.DT_INT32)
        plan = kvplan.plan(
            Transfer(
                Rows(desc, slot=3),
                Rows(RemoteCache(CacheIndex(0, 1, 3), desc)),
                layers=KvCacheExtParam((3, 3), (3, 3), 1),
            ),
            local="src",
        )
        assert tensor_pairs(plan) == [(3, 3)]
        assert segments(plan) == [(192, 192, 64)]

    def test_a_slice_of_a_plan_is_the_plan_of_those_layers(self) -> None:
        whole = layered(6, KvCacheExtParam(range(1, 3), range(2)))
        assert whole.for_layers(range(2, 3)) == layered(6, KvCacheExtParam((2, 2), (1, 1)))


class TestRemoteKeys:
    def test_the_key_names_the_slot(self) -> None:
        source = RemoteCache(CacheIndex(1, 7, 2), SLOTS)
        for index in (None, 2):
            plan = kvplan.plan(Transfer(Rows(source, slot=index), Rows(SLOTS, slot=1)), local="dst")
            assert segments(plan) == [(32, 16, 16)]
        plan = kvplan.plan(Transfer(Rows(SLOTS), Rows(source)), local="src")
        assert segments(plan) == [(0, 32, 16)]
        assert segments(kvplan.plan(Transfer(Rows(source), Rows(BLOCKS, [0])), local="dst")) == [
            (32, 0, 4)
        ]

    def test_names_do_not_change_the_plan(self) -> None:
        named = kvplan.plan(
            Transfer(
                Rows(Cache(BLOCKS, 7), [0]), Rows(RemoteCache(BlocksCacheKey(1), BLOCKS), [1])
            ),
            local="src",
        )
        assert named.part.src.name == "cache 7"
        assert named.part.dst.name == "BlocksCacheKey(cluster_id=1, model_id=0)"
        assert named == kvplan.plan(Transfer(Rows(BLOCKS, [0]), Rows(BLOCKS, [1])), local="src")

    @pytest.mark.parametrize(("cache_id", "name"), [(0, "cache 0"), (-1, "")])
    def test_a_cache_without_an_id_has_no_name(self, cache_id: int, name: str) -> None:
        assert (
            kvplan.plan(
                Transfer(Rows(Cache(BLOCKS, cache_id), [0]), Rows(Cache(BLOCKS, cache_id), [1]))
            ).part.src.name
            == name
        )


class TestSides:
    @pytest.mark.parametrize(
        ("plan", "local"),
        [
            (kvplan.plan(Transfer(Rows(SLOTS), Rows(SLOTS)), local="dst"), "dst"),
            (kvplan.plan(Transfer(Rows(BLOCKS, [0]), Rows(BLOCKS, [1])), local="dst"), "dst"),
            (kvplan.plan(Transfer(Rows(SLOTS), Rows(SLOTS)), local="src"), "src"),
            (kvplan.plan(Transfer(Rows(BLOCKS, [0]), Rows(BLOCKS, [1])), local="src"), "src"),
            (kvplan.plan(Transfer(Rows(SLOTS), Rows(SLOTS))), "both"),
            (kvplan.plan(Transfer(Rows(BLOCKS, [0]), Rows(BLOCKS, [1]))), "both"),
        ],
        ids=lambda value: value.operation if isinstance(value, Plan) else value,
    )
    def test_local_is_the_side_of_this_process(self, plan: Plan, local: str) -> None:
        assert plan.local == local

    def test_offsets_reach_beyond_four_gibibytes(self) -> None:
        large = CacheDesc(2, (2**40, 2**20), DataType.DT_INT8)
        plan = kvplan.plan(
            Transfer(Rows(large, [2**40 - 1, 5]), Rows(large, [0, 2**40 - 1])), local="dst"
        )
        assert segments(plan) == [
            (5 * 2**20, (2**40 - 1) * 2**20, 2**20),
            ((2**40 - 1) * 2**20, 0, 2**20),
        ]

    def test_the_largest_tensor_that_can_be_addressed(self) -> None:
        largest = CacheDesc(1, (1, 2**63 - 1), DataType.DT_INT8)
        assert kvplan.plan(Transfer(Rows(largest), Rows(largest))).nbytes == 2**63 - 1
        assert (
            np.uint64(
                kvplan.plan(
                    Transfer(Rows(largest, offset=2**63 - 2), Rows(largest, offset=2**63 - 2))
                ).nbytes
            )
            == 1
        )


def test_copies_ignore_layers_and_accept_any_number_of_tensors():
    host, device = (
        CacheDesc(3, (4, 8), DataType.DT_INT8, value)
        for value in (Placement.HOST, Placement.DEVICE)
    )
    for plan in (
        kvplan.plan(Transfer(Rows(host), Rows(host, slot=1))),
        kvplan.plan(Transfer(Rows(host, [0]), Rows(host, [1]))),
        kvplan.plan(Transfer(Rows(host, [0]), Rows(device, [1]))),
    ):
        assert plan.nbytes == 3 * 8
        assert plan.part.tensors_per_layer == 1
