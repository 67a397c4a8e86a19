"""Spans, intervals, tasks, layers and the pool at moments that only a program in C can choose."""

from __future__ import annotations

import pytest

from tests.support.compiled import Check, compiled


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    sources = (
        *("core/report.c", "core/executor.c", "core/layered.c", "host/pool.c", "host/job.c"),
        *("core/intervals.c", "core/library.c", "core/thread.c", "host/identity.c"),
        *("host/writers.c", "host/pooled.c", "process/guarded.c"),
    )
    return compiled(tmp_path_factory.mktemp("core"), "tests/native/core_main.c", *sources)


@pytest.mark.parametrize(
    "name",
    [
        *("merge_spans", "pass_wakes", "open_wakes", "order_wakes"),
        *("open_beside_failure", "abort_twice"),
        *("find_intervals", "find_calls", "rename_process", "first_thread_ends"),
        *("thread_blocks_signals", "sort_in_one_array"),
        *("helper_leaves", "give_up_between_pieces", "all_who_wait_wake", "renewed_and_left"),
        *("opened_again", "small_batches_in_a_hurry", "no_place_in_a_hurry"),
        *("gate_fails", "fail_beside_abort", "open_beside_abort", "layers_are_freed"),
        "late_is_forgiven",
    ],
)
def test_core(check: Check, name: str) -> None:
    check(name)
