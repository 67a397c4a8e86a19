"""What the copy kernel may be given, and memory that cannot be noted: what only C can look at."""

from __future__ import annotations

import pytest

from tests.support.compiled import Check, compiled


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    return compiled(tmp_path_factory.mktemp("reach"), "tests/cuda/reach_main.c")


@pytest.mark.parametrize(
    "name", ["mapped_access", "other_gpus", "several_users", "registered_again"]
)
def test_reach(check: Check, name: str) -> None:
    check(name)


def test_share(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("share")
    compiled(folder, "tests/cuda/share_main.c")("gone_if_not_noted")
