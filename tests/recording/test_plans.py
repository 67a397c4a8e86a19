"""A plan that was recorded can be had back: equal, with its texts, whatever made it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import CacheDesc, Coalesce, DataType, GroupPlan, Plan, Rows, Transfer
from kvplan.recording import read
from tests.planning import test_gather, test_unlike
from tests.planning.transfers import transfers
from tests.recording.operations import record, recorder


def assert_comes_back(*plans: Plan | GroupPlan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.kvrec")
        with recorder(path) as it:
            for plan in plans:
                record(it, plan)
        assert not it.dropped
        recording = read(path)
    found = [it.plan for it in recording.transfers]
    assert found == [*plans]
    for again, plan in zip(found, plans, strict=True):
        assert again.fingerprint == plan.fingerprint
        assert again.to_dict() == plan.to_dict()  # tables and names too, which are not compared
        assert again.explain(limit=None) == plan.explain(limit=None)


@given(transfers(), st.sampled_from(Coalesce))
def test_of_every_operation(example, coalesce):
    assert_comes_back(example.plan(coalesce))


@given(test_unlike.transfers(), st.booleans())
def test_between_unlike_caches(transfer, coalesce):
    plan = test_unlike.planned(transfer, coalesce)
    assert_comes_back(plan, plan.for_layers(plan.src_layers[-1:]))


@given(test_gather.requests())
def test_of_a_gather_which_takes_some_heads_of_each(request):
    sources, tables, dst, dst_blocks, num_tokens, rank = request
    rows = [Rows(source.desc, table) for source, table in zip(sources, tables, strict=True)]
    transfer = Transfer(rows, Rows(dst.desc, dst_blocks), num_tokens=num_tokens, rank=rank)
    plan = kvplan.plan(transfer)
    assert_comes_back(plan, *plan.groups.values())


@given(transfers(), st.sampled_from(Coalesce))
def test_of_groups(example, coalesce):
    plan = example.plan(coalesce)
    assert_comes_back(GroupPlan({"latent": plan, "scales": plan}))


@pytest.mark.parametrize("coalesce", Coalesce)
@pytest.mark.parametrize("blocks", [1, 2, 3000])
def test_of_tables_of_any_length(coalesce, blocks):
    desc = CacheDesc(2, (4096, 16), DataType.DT_FLOAT)
    src = [(7 * it) % 4096 for it in range(blocks)]
    dst = [*reversed(range(blocks))]
    assert_comes_back(
        kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst), coalesce=coalesce), local="dst")
    )
