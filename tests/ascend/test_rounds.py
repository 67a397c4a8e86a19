"""Rounds of a put with leases, in C: which descriptor has failed."""

from __future__ import annotations

import pytest

from tests.support.compiled import compiled


def test_the_failed_descriptor_of_any_round(tmp_path_factory: pytest.TempPathFactory) -> None:
    compiled(tmp_path_factory.mktemp("rounds"), "tests/ascend/rounds_main.c")("failed_descriptor")
