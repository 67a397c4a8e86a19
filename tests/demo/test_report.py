"""Tests of the demo's report, above all of its two comparisons."""

from dataclasses import replace

import pytest

from examples.disaggregated.messages import Generated, Moved, MovedByLayer
from examples.disaggregated.report import (
    Console,
    DemoError,
    check_changed,
    check_identical,
    first_difference,
    hidden_text,
    moved_text,
)


def generated(*ids: int) -> Generated:
    return Generated(list(ids), "text of " + " ".join(map(str, ids)), seconds=1.0)


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [3, 2], 0),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [1], 0),
    ],
)
def test_the_first_difference_is_found(a: list[int], b: list[int], at: int | None) -> None:
    assert first_difference(a, b) == at


def test_equal_runs_are_identical_and_not_changed() -> None:
    assert check_identical(generated(1, 2), generated(1, 2), "pulled").startswith(
        "IDENTICAL: all 2 token"
    )
    with pytest.raises(DemoError, match="changed none of the 2 tokens"):
        check_changed(generated(1, 2), generated(1, 2), "block")


def test_one_different_token_is_detected() -> None:
    with pytest.raises(DemoError, match=r"differ from position 1 on: .*\[5\].*\[2\](.|\n)*text of"):
        check_identical(generated(1, 5), generated(1, 2), "pulled")
    with pytest.raises(DemoError, match="differ from position 2 on"):
        check_identical(generated(1, 2), generated(1, 2, 3), "pushed")
    assert check_changed(generated(1, 2), generated(1, 3), "head").startswith(
        "CHANGED: from token 1 on"
    )


def test_the_report_of_a_transfer_has_its_costs() -> None:
    moved = Moved(
        explanation="",
        nbytes=8_000_000,
        num_slices=1800,
        num_descriptors=840,
        plan_seconds=85e-6,
        transfer_seconds=0.002,
        repeated_seconds=0.001,
    )
    costs = (
        "  bytes        8,000,000\n"
        "  descriptors  1,800 before coalescing, 840 after\n"
        "{}"
        "  planned in   85 us\n"
        "  moved in     2.00 ms, 4.0 GB/s (planned, too)\n"
        "  again        1.00 ms, 8.0 GB/s (median of repetitions)"
    )
    assert moved_text(moved) == costs.format("")
    linked = replace(moved, link_seconds=0.0012)
    assert moved_text(linked) == costs.format("  linked in    1.2 ms\n")


def test_the_report_of_a_push_by_layers_has_the_hidden_share() -> None:
    by_layer = MovedByLayer(
        plans=["<Plan 1>", "<Plan 2>"],
        nbytes=8_000_000,
        compute_seconds=1.234,
        ready_seconds=[0.0001, 0.002],
        visible_seconds=0.0002,
    )
    whole = Moved("", 8_000_000, 0, 0, 0.0, transfer_seconds=0.004, repeated_seconds=0.001)
    assert hidden_text(by_layer, whole) == (
        "  chunk 0      <Plan 1>\n"
        "  chunk 1      <Plan 2>\n"
        "  bytes        8,000,000\n"
        "  computed in  1.23 s, 2.1 ms of it in 2 calls of ready()\n"
        "  then waited  0.20 ms for the rest to arrive\n"
        "  hidden       95% of the 4.00 ms that the push took by itself"
    )


def test_lines_of_generated_text_have_a_mark(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console()
    for piece in ("Once", " upon\n", "\na", " time"):
        console.piece(piece)
    console.lines("after")
    assert capsys.readouterr().out == "  | Once upon\n  | \n  | a time\nafter\n"
