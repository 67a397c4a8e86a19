"""What the copy kernel may be given, memory that cannot be noted, dropped streams: all in C."""

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
        *("asked_once_without_a_range", "registered_again"),
    ],
)
def test_reach(check: Check, name: str) -> None:
    check(name)


def test_share(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("share")
    compiled(folder, "tests/cuda/share_main.c")("gone_if_not_noted")


def test_of_a_stream_that_is_dropped_nothing_is_left(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    compiled(tmp_path_factory.mktemp("launch"), "tests/cuda/launch_main.c")("dropped_stream")
