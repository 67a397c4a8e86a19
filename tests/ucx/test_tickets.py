"""Tickets of a worker that has announced 2**32 transfers."""

from __future__ import annotations

import pytest

from tests.support.compiled import compiled


def test_no_ticket_is_zero(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tickets")
    compiled(folder, "tests/ucx/tickets_main.c")("after_the_last_number")
