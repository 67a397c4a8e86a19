"""Plans are restored from a recording: equal, with their texts, and of every kind."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, HostMemory, KvCacheExtParam, Plan, Rows, Transfer
from kvplan.execution.rows import RowRequests
from kvplan.planning.kinds import plan_rows
from kvplan.planning.side import side
from kvplan.recording import read
from kvplan.recording.format import PartRow, TemplateRow, plan_of, template_of
from tests.planning import test_gather, test_unlike
from tests.planning.transfers import transfers
from tests.recording.operations import record, recorder
from tests.support.plans import joined, lower_natively


def assert_restored(*plans: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.kvrec")
        with recorder(path) as writer:
            for plan in plans:
                record(writer, plan)
        assert not writer.dropped
        recording = read(path)
    found = [transfer.plan for transfer in recording.transfers]
    assert found == [*plans]
    for again, plan in zip(found, plans, strict=True):
        assert again.fingerprint == plan.fingerprint
        assert again.to_dict() == plan.to_dict()  # also fields that equality ignores
        assert again.explain(limit=None) == plan.explain(limit=None)


@given(transfers(), st.sampled_from(Coalesce))
def test_plans_of_every_operation_are_restored(example, coalesce):
    assert_restored(example.plan(coalesce))


@given(test_unlike.transfers(), st.booleans())
def test_plans_between_unlike_caches_are_restored(transfer, coalesce):
    plan = test_unlike.planned(transfer, coalesce)
    assert_restored(plan, plan.for_layers(plan.part.src_layers[-1:]))


@given(test_gather.requests())
def test_plans_of_a_gather_of_heads_are_restored(request):
    sources, tables, dst, dst_blocks, num_tokens, rank = request
    rows = [Rows(source.desc, table) for source, table in zip(sources, tables, strict=True)]
    transfer = Transfer(rows, Rows(dst.desc, dst_blocks), num_tokens=num_tokens, rank=rank)
    plan = kvplan.plan(transfer)
    assert_restored(plan, *plan.by_part().values())


@given(transfers(), st.sampled_from(Coalesce))
def test_plans_of_groups_are_restored(example, coalesce):
    plan = example.plan(coalesce)
    assert_restored(joined({"latent": plan, "scales": plan}))


@pytest.mark.parametrize("coalesce", Coalesce)
@pytest.mark.parametrize("blocks", [1, 2, 3000])
def test_tables_of_any_length_are_restored(coalesce, blocks):
    desc = CacheDesc(2, (4096, 16), DataType.DT_FLOAT)
    src = [(7 * number) % 4096 for number in range(blocks)]
    dst = [*reversed(range(blocks))]
    assert_restored(
        kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst), coalesce=coalesce), local="dst")
    )


DESC = CacheDesc(8, (64, 16), DataType.DT_FLOAT)
LAYERS = (((0, 2), (0, 2)), ((0, 2), (1, 3)), ((0, 2), (2, 4)), ((1, 3), (0, 2)), ((0, 1), (0, 1)))
VARIANTS = [
    kvplan.plan(
        Transfer(
            Rows(DESC, [1, 2]),
            Rows(DESC, [3, 4]),
            layers=KvCacheExtParam(range(*of_src), range(*of_dst), 2),
        )
    )
    for of_src, of_dst in LAYERS
]


@pytest.mark.parametrize("one", range(len(VARIANTS)))
@pytest.mark.parametrize("other", range(len(VARIANTS)))
def test_plans_of_the_same_caches_with_other_layers_are_restored(one, other):
    """A recorder recognizes the two sides of both plans by their identity."""
    src, dst = VARIANTS[0].part.src, VARIANTS[0].part.dst
    parts = [replace(VARIANTS[number].part, src=src, dst=dst) for number in (one, other, one)]
    assert_restored(*map(Plan.made, parts))


def test_each_side_has_the_name_of_its_operation():
    """The sides of a template are read once for all plans."""
    desc = CacheDesc(2, (16, 16), DataType.DT_FLOAT)
    part = kvplan.plan(Transfer(Rows(desc, [1, 2]), Rows(desc, [5, 7])), local="dst").part
    tables = [np.array(row, "<i8").tobytes() for row in ([1, 2], [5, 7])]
    template = TemplateRow(7, template_of(part), ("by key", "by index"), (3, 8))
    found = plan_of({7: template}, [PartRow("latent", 1, 7, *tables, None)])
    assert found is not None
    assert (found.parts[0].name, found.parts[0].source) == ("latent", 1)
    sides = found.parts[0].src, found.parts[0].dst
    assert [(side.way, side.cache_id) for side in sides] == [("by key", 3), ("by index", 8)]
    again = plan_of({7: template}, [PartRow("latent", 0, 7, *tables, None)])
    assert again is not None
    assert (again.parts[0].src is sides[0], again.parts[0].dst is sides[1]) == (True, True)


@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("kind", ["B2B", "C2B", "C2C"])
def test_a_request_that_was_lowered_without_a_plan_is_recorded_as_its_plan(tmp_path, kind, tokens):
    """Whole rows are not planned: slots of 8 tokens, into blocks of 4 or a shorter slot."""
    sizes = {"B2B": (4, 4), "C2B": (8, 4), "C2C": (8, 6)}[kind]
    sides, memories = [], []
    words = {"B": "block", "C": "slot"}
    for row, size in zip((words[kind[0]], words[kind[2]]), sizes, strict=True):
        desc = CacheDesc(2, (6, size, 8), DataType.DT_INT8, kv_tensor_format=f"{row} token dim")
        sides.append(side("it", desc, paged=row == "block"))
        memories.append(HostMemory.from_arrays([np.zeros(desc.shape, np.int8) for _ in range(2)]))
    read_rows, written = {
        "B2B": ([5, 1], [0, 2]), "C2B": ((3,), [4, 2]), "C2C": ((3,), (4,)),
    }[kind]  # fmt: skip
    operation = "pull_cache" if kind == "C2C" else "pull_blocks"
    arguments = kind, *sides, *memories, read_rows, written
    bound = lower_natively(RowRequests(), operation, *arguments, num_tokens=tokens)
    assert bound is not None
    with recorder(tmp_path / "a.kvrec") as writer:
        record(writer, bound[0])
        assert ("segments" in vars(bound[0].part)) is (tokens is not None)
    (row,) = read(tmp_path / "a.kvrec").transfers
    part = plan_rows(operation, kind, *sides, read_rows, written, num_tokens=tokens)
    assert row.plan == Plan([part])


@pytest.mark.parametrize("coalesce", Coalesce)
def test_rows_with_gaps_between_them_are_recorded_as_their_plan(coalesce):
    """Two caches that share a memory have such gaps: the blocks of one lie between the other's."""
    blocks, spaced = (
        CacheDesc(2, (6, 4, 8), DataType.DT_INT8, kv_tensor_format="block token dim", row_stride=n)
        for n in (40, 56)
    )
    slots = CacheDesc(
        2, (6, 8, 8), DataType.DT_INT8, kv_tensor_format="slot token dim", row_stride=80
    )
    assert_restored(
        *(
            kvplan.plan(Transfer(src, dst, coalesce=coalesce), local="dst")
            for src, dst in (
                (Rows(blocks, [1, 2, 5]), Rows(blocks, [0, 3, 4])),
                (Rows(blocks, [5, 4]), Rows(spaced, [2, 1])),
                (Rows(slots, slot=3), Rows(spaced, [4, 2])),
            )
        )
    )
