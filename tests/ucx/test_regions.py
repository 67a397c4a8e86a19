"""Memory that UCX refuses to register, which never happens over shared memory."""

from __future__ import annotations

import pytest

from tests.support.compiled import compiled


def test_refused_memory_leaves_nothing_registered(tmp_path_factory: pytest.TempPathFactory) -> None:
    compiled(tmp_path_factory.mktemp("regions"), "tests/ucx/regions_main.c")("nothing_left")
