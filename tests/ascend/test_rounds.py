"""C tests of the rounds of a put with leases: the failed descriptor."""

from __future__ import annotations

import pytest

from tests.support.compiled import compiled


def test_the_failed_descriptor_of_any_round_is_named(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    compiled(tmp_path_factory.mktemp("rounds"), "tests/ascend/rounds_main.c")("failed_descriptor")
