"""HIXL's servers, in C: what two threads do to one of them."""

from __future__ import annotations

import pytest

from tests.support.compiled import compiled


def test_two_threads_close_a_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    compiled(tmp_path_factory.mktemp("server"), "tests/ascend/server_main.c")("two_close")
