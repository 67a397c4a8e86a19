"""Tickets of a worker, and the ends of transfers, which only C can inspect."""

from __future__ import annotations

import pytest

from tests.support.compiled import compiled


@pytest.mark.parametrize(
    "name",
    [
        *("after_the_last_number", "gone_at_the_end", "flushed_before_the_end"),
        *("waited_for_before_the_end", "renewed_after_each_round"),
    ],
)
def test_tickets(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    compiled(tmp_path_factory.mktemp("tickets"), "tests/ucx/tickets_main.c")(name)
