"""The table of registered ranges, and the places of connections, which only C can inspect."""

from __future__ import annotations

import pytest

from tests.support.compiled import Check, compiled


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    folder = tmp_path_factory.mktemp("table")
    return compiled(
        folder,
        "tests/tcp/table_main.c",
        "tcp/table.c",
        "tcp/service.c",
        "tcp/transfer.c",
        "tcp/server.c",
    )


@pytest.mark.parametrize(
    "name",
    [
        *("earliest_deadline", "renewed_under_way", "key_of_reused_place"),
        *("given_up_when_all_was_taken", "refused_rows", "push_of_gone_peer", "unwatched"),
        *("no_threads", "no_link", "last_user"),
    ],
)
def test_table(check: Check, name: str) -> None:
    check(name)
