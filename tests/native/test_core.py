"""Tasks, layers, the pool and announcements at moments that only C programs can choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.compiled import Check, compiled

CHECKS = {
    "core": (
        *("merge_spans", "add_to_a_full_report", "sort_in_one_array", "find_intervals"),
        *("find_calls", "rename_process", "first_thread_ends", "thread_blocks_signals"),
        "wait_until_the_deadline",
    ),
    "endings": ("ends_while_it_is_watched", "is_watched_while_it_ends"),
    "tasks": (
        *("pass_wakes", "open_wakes", "order_wakes", "gate_fails", "opened_again"),
        *("small_batches_in_a_hurry", "open_beside_failure", "abort_twice", "fail_beside_abort"),
        *("open_beside_abort", "layers_are_freed", "deadline_wakes", "held_at_its_gate"),
    ),
    "waiting": (
        *("helper_leaves", "give_up_between_pieces", "all_who_wait_wake", "bytes_beside_a_wait"),
    ),
    "nodes": (
        *("which_piece_is_next", "alternating_nodes_make_no_tiny_pieces"),
        *("every_byte_is_claimed_once", "answers_are_kept_for_a_while", "the_kernel_knows_pages"),
    ),
    "crews": (
        *("threads_are_spread", "threads_are_bound_to_their_nodes", "a_thread_knows_its_node"),
        *("each_moves_its_own", "the_idle_one_steals", "one_thread_moves_both"),
        *("memory_of_others_has_no_node", "the_right_one_wakes", "a_caller_moves_its_own_first"),
        *("an_abort_leaves_the_rest_of_both", "only_own_destinations_have_a_node"),
    ),
    "announced": (
        *("renewed_and_left", "no_place_in_a_hurry", "late_is_forgiven", "renewed_beside_a_wait"),
        *("passed_by_an_earlier_ticket", "left_by_a_former_user"),
    ),
}
"""Checks by program: `core_main.c`, and so on."""

SOURCES = {
    "core": (
        "core/report.c",
        "core/intervals.c",
        "core/library.c",
        "core/thread.c",
        "host/identity.c",
    ),
    "endings": (),
    "tasks": ("core/report.c", "core/executor.c", "core/layered.c"),
    "waiting": (
        *("core/report.c", "core/executor.c", "core/layered.c"),
        *("host/pool.c", "host/places.c", "host/numa.c", "host/job.c", "host/pooled.c"),
    ),
    **dict.fromkeys(
        ("nodes", "crews"),
        (
            *("core/report.c", "core/thread.c"),
            *("host/pool.c", "host/places.c", "host/numa.c", "host/job.c"),
        ),
    ),
    "announced": ("core/report.c", "host/identity.c", "host/writers.c", "process/guarded.c"),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Check]:
    """A function that compiles a program by its name when its first check runs."""
    folder = tmp_path_factory.mktemp("core")
    return lambda name: compiled(folder, f"tests/native/{name}_main.c", *SOURCES[name])


@pytest.mark.parametrize(
    ("main", "name"), [(main, name) for main, names in CHECKS.items() for name in names]
)
def test_core(program: Callable[[str], Check], main: str, name: str) -> None:
    program(main)(name)
