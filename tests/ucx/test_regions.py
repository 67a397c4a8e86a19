"""Memory that UCX does not register: its refusals come from no UCX over shared memory."""

from __future__ import annotations

import pytest

from tests.support.compiled import compiled


def test_of_refused_memory_nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    compiled(tmp_path_factory.mktemp("regions"), "tests/ucx/regions_main.c")("nothing_left")
