"""What is confirmed and failed, which events are kept, what is to do: what only C can look at."""

from __future__ import annotations

import pytest

from tests.support.compiled import compiled


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("copy", "blocking_behind_asynchronous"),
        ("copy", "failed_behind_others"),
        ("events", "kept_by_context"),
        ("events", "load_of_what_is_left"),
    ],
)
def test_device(tmp_path_factory: pytest.TempPathFactory, source: str, name: str) -> None:
    compiled(tmp_path_factory.mktemp(source), f"tests/device/{source}_main.c")(name)
