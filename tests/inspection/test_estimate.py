"""What a transfer is expected to cost: the arithmetic, what people read, and the fit."""

from __future__ import annotations

import itertools
import random

import pytest

import kvplan
from kvplan import (
    TRANSPORT_COSTS,
    CacheDesc,
    CostLine,
    DataType,
    Estimate,
    LLMException,
    LLMStatusCode,
    Plan,
    Rows,
    Transfer,
    TransportCost,
)
from tests.support.refusals import refused

KIB, MIB = 1 << 10, 1 << 20
LINE = CostLine(fixed_us=100, call_us=2, descriptor_us=0.5, mib_us=250)
COST = TransportCost(
    name="wire",
    way="gathered",
    call="message",
    call_nbytes=64 * KIB,
    call_descriptors=4,
    lines=(LINE,),
)


def scattered(tensors: int, blocks: int, block_nbytes: int) -> Plan:
    """Every second block, so that none merge."""
    desc = CacheDesc(tensors, (2 * blocks, block_nbytes), DataType.DT_UINT8)
    return kvplan.plan(
        Transfer(Rows(desc, range(0, 2 * blocks, 2)), Rows(desc, range(0, 2 * blocks, 2))),
        local="dst",
    )


PLAN = scattered(2, 3, 32 * KIB)


def test_an_estimate_is_the_sum_of_its_parts() -> None:
    estimate = PLAN.estimate(COST)
    assert (estimate.descriptors, estimate.nbytes, estimate.calls) == (6, 192 * KIB, 3)
    assert estimate.fixed_ms == pytest.approx(0.1)
    assert estimate.calls_ms == pytest.approx(0.006)
    assert estimate.descriptors_ms == pytest.approx(0.003)
    assert estimate.bytes_ms == pytest.approx(0.046875)
    assert estimate.ms == pytest.approx(0.155875)
    assert estimate.gigabytes_per_s == pytest.approx(192 * KIB / 0.155875e-3 / 1e9)


def test_what_people_read() -> None:
    assert str(PLAN.estimate(COST)).splitlines() == [
        "pull_blocks over wire, gathered: 0.156 ms, 1.26 GB/s",
        "  0.100 ms  fixed",
        "  0.006 ms  3 messages",
        "  0.003 ms  6 descriptors",
        "  0.047 ms  192 KiB",
    ]


def test_a_tree_has_one_line_more_under_its_head() -> None:
    lines = PLAN.explain(transport=COST).splitlines()
    assert lines.pop(4) == "  over wire: gathered, 3 messages | 192 KiB | about 0.156 ms"
    assert lines == PLAN.explain().splitlines()


def test_a_table_has_one_line_more_at_its_end() -> None:
    lines = PLAN.explain("table", transport=COST).splitlines()
    assert lines.pop() == "over wire: gathered, 3 messages | 192 KiB | about 0.156 ms"
    assert lines == PLAN.explain("table").splitlines()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("hccl", "over hccl: one-sided, 1 HCCL operation | 192 KiB | time not known"),
        ("acl", "over acl: batch copies of ACL | 192 KiB | time not known"),
    ],
)
def test_what_was_never_measured_has_no_time(name: str, line: str) -> None:
    assert PLAN.explain(transport=name).splitlines()[4] == f"  {line}"
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, f"'{name}': it has run on simulated"):
        PLAN.estimate(name)


def test_a_name_that_there_is_not_is_answered_with_those_that_there_are() -> None:
    names = ", ".join(TRANSPORT_COSTS)
    with pytest.raises(LLMException, match=f"'rdma' must be one of {names}, or a TransportCost"):
        PLAN.estimate("rdma")
    with pytest.raises(TypeError, match=r"transport=7 must be str"):
        PLAN.explain(transport=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [it for it in TRANSPORT_COSTS.values() if it.lines])
def test_more_never_costs_less(cost: TransportCost) -> None:
    """Also from one line to the next: they must meet, about."""
    for block in (4 * KIB, 32 * KIB, 256 * KIB):
        times = [scattered(2, count, block).estimate(cost).ms for count in range(1, 200, 3)]
        assert all(less <= 1.1 * more for less, more in itertools.pairwise(times)), times


def measured(cost: TransportCost, noise: float = 0.0) -> list[tuple[Plan, float]]:
    rng = random.Random(7)
    shapes = itertools.product((2, 16), (1, 5, 40, 300), (4 * KIB, 32 * KIB, 512 * KIB))
    plans = [scattered(*shape) for shape in shapes]
    return [(it, it.estimate(cost).ms * (1 + rng.uniform(-noise, noise))) for it in plans]


def test_a_fit_finds_the_costs_behind_the_measurements() -> None:
    fitted = COST.fit(measured(COST), name="mine")
    (line,) = fitted.lines
    assert (fitted.name, fitted.way, fitted.call_nbytes) == ("mine", "gathered", 64 * KIB)
    for name in ("fixed_us", "call_us", "descriptor_us", "mib_us"):
        assert getattr(line, name) == pytest.approx(getattr(LINE, name), rel=1e-6)


def test_a_fit_of_noisy_measurements_is_as_near_as_they_are() -> None:
    fitted = COST.fit(measured(COST, noise=0.1))
    for plan, ms in measured(COST):
        assert plan.estimate(fitted).ms == pytest.approx(ms, rel=0.1)


def test_no_coefficient_is_negative() -> None:
    """Where larger calls are cheaper for each byte, a plain fit would have one below 0."""
    less = [(plan, ms**0.8) for plan, ms in measured(COST)]
    (line,) = COST.fit(less).lines
    assert min(line.fixed_us, line.call_us, line.descriptor_us, line.mib_us) >= 0


def test_each_range_of_sizes_has_its_own_line() -> None:
    small = CostLine(fixed_us=5, mib_us=100, upto_nbytes=MIB)
    cost = TransportCost(name="pool", way="mapped", lines=(small, CostLine(fixed_us=70, mib_us=40)))
    assert scattered(1, 1, MIB).estimate(cost).ms == pytest.approx(0.105)
    assert scattered(1, 2, MIB).estimate(cost).ms == pytest.approx(0.150)
    again = cost.fit(measured(cost))
    assert [line.upto_nbytes for line in again.lines] == [MIB, None]
    assert again.lines[0].mib_us == pytest.approx(100)
    assert again.lines[1].mib_us == pytest.approx(40)


def test_one_transfer_is_enough_to_measure_a_machine() -> None:
    faster = COST.scale([(PLAN, PLAN.estimate(COST).ms / 4)], name="host 7")
    assert (faster.name, faster.way, faster.call_nbytes) == ("host 7", "gathered", 64 * KIB)
    assert faster.source == "scaled by 0.25 to 1 measured transfer"
    for plan, ms in measured(COST):
        assert plan.estimate(faster).ms == pytest.approx(ms / 4)


def test_of_several_the_odd_one_does_not_count() -> None:
    disturbed = [(plan, 2 * ms) for plan, ms in measured(COST)] + [(PLAN, 1e6)]
    assert PLAN.estimate(COST.scale(disturbed)).ms == pytest.approx(2 * PLAN.estimate(COST).ms)


def test_each_line_is_scaled_and_ends_where_it_did() -> None:
    cost = TRANSPORT_COSTS["local"]
    assert len(cost.lines) > 1
    twice = cost.scale([(PLAN, 2 * PLAN.estimate(cost).ms)])
    assert twice.source == f"scaled by 2 to 1 measured transfer; {cost.source}"
    assert [it.upto_nbytes for it in twice.lines] == [it.upto_nbytes for it in cost.lines]
    for plan, ms in measured(cost):
        assert plan.estimate(twice).ms == pytest.approx(2 * ms)


def test_what_nothing_can_be_scaled_by() -> None:
    with pytest.raises(LLMException, match="measurements: there are none; one transfer is enough"):
        COST.scale([])
    with pytest.raises(LLMException, match=r"= -1 must be > 0 and at most"):
        COST.scale([(PLAN, -1)])
    with pytest.raises(TypeError, match="must be a number"):
        COST.scale([(PLAN, None)])  # type: ignore[list-item]
    free = TransportCost(name="free", way="", lines=(CostLine(),))
    with pytest.raises(LLMException, match=r"free: .* costs 0 ms, which no factor changes"):
        free.scale([(PLAN, 1.0)])
    with refused(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "'hccl': it has run on simulated"):
        TRANSPORT_COSTS["hccl"].scale([(PLAN, 1.0)])


def test_an_estimate_is_a_value() -> None:
    assert PLAN.estimate(COST) == PLAN.estimate(COST)
    assert isinstance(PLAN.estimate("local"), Estimate)


@pytest.mark.parametrize(
    ("measurements", "reason"),
    [
        ([(PLAN, 1.0)] * 3, "3 of any size; wire needs at least 4"),
        ([(PLAN, 0.0)] * 4, "= 0.0 must be > 0 and at most"),
        ([(PLAN, 10**400)] * 4, r"must be > 0 and at most 1e\+12"),
        ([(PLAN, float("nan"))] * 4, "= nan must be > 0 and at most"),
    ],
)
def test_measurements_that_are_invalid(measurements: list[tuple[Plan, float]], reason: str) -> None:
    with pytest.raises(LLMException, match=reason):
        COST.fit(measurements)
    with pytest.raises(TypeError, match="must be a number"):
        COST.fit([(PLAN, "1 ms")])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"fixed_us": -1}, "fixed_us=-1 must be >= 0 and finite"),
        ({"mib_us": float("inf")}, "mib_us=inf must be"),
        ({"upto_nbytes": 0}, "upto_nbytes=0 must be None or >= 1"),
    ],
)
def test_costs_that_cannot_be(arguments: dict[str, float], reason: str) -> None:
    with pytest.raises(LLMException, match=reason):
        CostLine(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("bounds", [[1], [None, None], [2, 1, None], [None, 5]])
def test_lines_ascend_and_leave_no_size_out(bounds: list[int | None]) -> None:
    lines = tuple(CostLine(upto_nbytes=it) for it in bounds)
    with pytest.raises(LLMException, match="must ascend and end in None"):
        TransportCost(name="x", way="y", lines=lines)
