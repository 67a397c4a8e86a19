"""Plans of ranges of addresses: their sizes, and the parts that are built at their first use."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import Placement, Plan
from kvplan.planning.plan import OBSERVERS
from kvplan.planning.ranges import RangePart, RangePlan, Ranges
from kvplan.planning.side import Side

ONE = Side(1, 1, 256, False, Placement.HOST, cache_id=7)
SEVERAL = Side(3, 1, 128, False, Placement.HOST, cache_id=9)


def test_the_sizes_of_a_plan_of_ranges_do_not_need_its_parts() -> None:
    def make() -> list[RangePart]:
        raise AssertionError("logs and traces of each transfer ask only for numbers")

    columns = (np.array(column, np.uint64) for column in ([64, 96, 128], [0, 32, 64], [4, 4, 4]))
    plan = RangePlan(Ranges(*columns, pulls=True), 2, 12, make)
    numbers = plan.num_descriptors, plan.num_tensor_pairs, plan.nbytes
    assert (numbers, plan.kind, plan.operation) == ((3, 2, 12), "C2C", "pull_ranges")


@pytest.mark.parametrize("pulls", [True, False])
def test_each_pair_of_tensors_is_a_part_of_the_ranges_between_them(pulls: bool) -> None:
    src, dst, nbytes = (
        np.array(column, np.uint64)
        for column in ([0x1010, 0x1080, 0x2004], [0x5000, 0x5020, 0x6030], [8, 16, 4])
    )
    pairs = [
        RangePart(ONE, SEVERAL, 0, 2, 0x1000, 0x5000, 0, 2, 5),
        RangePart(SEVERAL, ONE, 1, 0, 0x2000, 0x6000, 2, 3, 1),
    ]
    plan = RangePlan(Ranges(src, dst, nbytes, pulls), 2, 28, lambda: pairs)
    assert plan.operation == ("pull_ranges" if pulls else "push_ranges")
    assert plan.local == ("dst" if pulls else "src")
    assert [
        (
            part.label, part.operation, part.src, part.dst, part.src_tensors, part.dst_tensors,
            [*part.segments], part.num_slices,
        )
        for part in plan.parts
    ] == [
        (
            "7 to 9.2", plan.operation, ONE, SEVERAL, range(1), range(2, 3),
            [(0x10, 0, 8), (0x80, 0x20, 16)], 5,
        ),
        ("9.1 to 7", plan.operation, SEVERAL, ONE, range(1, 2), range(1), [(4, 0x30, 4)], 1),
    ]  # fmt: skip
    assert repr(plan.by_part()["7 to 9.2"]).endswith("C2C L0>2 x 1 slot: 2 desc, 24 B>")
    assert plan == Plan(plan.parts)
    assert (plan.nbytes, plan.num_descriptors) == (28, Plan(plan.parts).num_descriptors)
    first = "local {}, remote {}, 16 bytes".format(
        *["[0x1080, 0x1090)", "[0x5020, 0x5030)"][:: -1 if pulls else 1]
    )
    for unconfirmed in ([(1, 3)], [(1, 2), (2, 3)]):
        assert plan.missing_text(unconfirmed) == f"; the first that is not confirmed: {first}"
    assert plan.missing_text([]) == ""


def test_observers_get_the_plan_of_ranges() -> None:
    seen: list[Plan] = []
    OBSERVERS.append(seen.append)
    try:
        columns = (np.array([number], np.uint64) for number in (64, 32, 4))
        plan = RangePlan(Ranges(*columns, pulls=True), 1, 4, list)
    finally:
        OBSERVERS.pop()
    assert len(seen) == 1
    assert seen[0] is plan
