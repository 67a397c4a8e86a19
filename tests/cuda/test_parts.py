"""C tests: memory that the copy kernel may use, memory that cannot be noted, dropped streams."""

from __future__ import annotations

import pytest

from tests.support.compiled import Check, compiled


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    return compiled(tmp_path_factory.mktemp("reach"), "tests/cuda/reach_main.c")


@pytest.mark.parametrize(
    "name",
    [
        *("mapped_access", "other_gpus", "several_users", "least_of_all_pieces"),
        *("asked_once_without_a_range", "registered_again", "found_by_a_transfer"),
    ],
)
def test_the_kernel_gets_only_reachable_memory(check: Check, name: str) -> None:
    check(name)


def test_memory_that_cannot_be_noted_is_not_shared(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("share")
    compiled(folder, "tests/cuda/share_main.c")("gone_if_not_noted")


def test_a_dropped_stream_leaves_no_resources(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    compiled(tmp_path_factory.mktemp("launch"), "tests/cuda/launch_main.c")("dropped_stream")
