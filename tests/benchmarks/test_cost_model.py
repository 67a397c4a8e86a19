"""How the measured and the foretold are compared; what moves nothing is tried here alone."""

from __future__ import annotations

import pytest

import kvplan
from benchmarks.cost_model import OPTIONS, SHAPES, Sample, line_text, report, sizes
from kvplan import TRANSPORT_COSTS, CostLine, Plan, Rows, Transfer, TransportCost

TRUE = CostLine(fixed_us=200, descriptor_us=0.5, mib_us=90)


def plan_of(shape: int, tensors: int, blocks: int) -> Plan:
    desc = SHAPES[shape].desc
    part = type(desc)(tensors, desc.shape, desc.data_type)
    return kvplan.plan(
        Transfer(Rows(part, range(0, 2 * blocks, 2)), Rows(part, range(0, 2 * blocks, 2))),
        local="dst",
    )


def samples(odd: float) -> list[Sample]:
    """As measured where the costs are TRUE, but for one held-out size."""
    cost = TransportCost(name="true", way="mapped", lines=(TRUE,))
    found = []
    for size, held_out in sizes(quick=True):
        plan = plan_of(*size)
        seconds = plan.estimate(cost).ms / 1e3
        found.append(Sample(plan, held_out, lambda: 0.0, [seconds] * 3))
    last = next(it for it in reversed(found) if it.held_out)
    last.seconds = [odd * it for it in last.seconds]
    return found


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a transport without costs."""
    cost = TransportCost(name="local", way="mapped")
    monkeypatch.setattr("benchmarks.cost_model.TRANSPORT_COSTS", {"local": cost})
    return "local"


def test_sizes_of_both_kinds_are_not_the_same_ones() -> None:
    kinds = [{size for size, held_out in sizes(quick=False) if held_out is kind} for kind in (0, 1)]
    assert not kinds[0] & kinds[1]
    assert all(2 * size.blocks <= SHAPES[size.shape].blocks for size in kinds[0] | kinds[1])
    assert all(size.tensors <= SHAPES[size.shape].tensors for size in kinds[0] | kinds[1])


def test_predictions_hold(unmeasured: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(unmeasured, samples(odd=1.0), every=False)
    printed = capsys.readouterr().out
    assert f"  {line_text(TRUE)}\n" in printed
    assert "median error 0%, largest 0%" in printed


def test_one_size_that_takes_twice_as_long_is_found(
    unmeasured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not report(unmeasured, samples(odd=2.0), every=False)
    assert "largest 50%" in capsys.readouterr().out


TWICE = CostLine(fixed_us=400, descriptor_us=1, mib_us=180)
THRICE = CostLine(fixed_us=600, descriptor_us=1.5, mib_us=270)
OTHERS = CostLine(fixed_us=20, descriptor_us=0.5, mib_us=90)


@pytest.mark.parametrize(("line", "holds"), [(TWICE, True), (THRICE, False), (OTHERS, False)])
def test_the_costs_of_another_machine(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: CostLine,
    holds: bool,
) -> None:
    """Slower in everything is one factor; too much slower, or in part, is found wrong."""
    cost = TransportCost(name="local", way="mapped", lines=(line,))
    monkeypatch.setattr("benchmarks.cost_model.TRANSPORT_COSTS", {"local": cost})
    assert report("local", samples(odd=1.0), every=False) is holds
    printed = capsys.readouterr().out
    assert "fitted costs: 11 of 11 within 30%" in printed
    assert ("kvplan's costs times 0.50: 11 of 11 within 30%; median error 0%" in printed) is holds


def test_every_measured_transport_has_costs_and_options() -> None:
    assert {it.name for it in TRANSPORT_COSTS.values() if it.lines} <= set(OPTIONS)
    assert set(OPTIONS) <= set(TRANSPORT_COSTS)
