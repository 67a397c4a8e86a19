"""C tests of the device code: outcomes, interrupts and kept events, which only C can observe."""

from __future__ import annotations

import pytest

from tests.support.compiled import compiled


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("copy", "blocking_behind_asynchronous"),
        ("copy", "failed_behind_others"),
        ("copy", "nothing_left_after_wait"),
        ("copy", "empty_descriptors"),
        ("copy", "waited_for_after_failure"),
        ("copy", "limited_blocking_calls"),
        ("events", "kept_by_context"),
        ("events", "load_of_what_is_left"),
        ("events", "interrupt_ends_with_its_job"),
        ("events", "await_wakes"),
        ("events", "begun_without_waiting"),
        ("events", "first_of_each_stream"),
        ("events", "one_without_room"),
        ("events", "used_for_another_stream"),
        ("shards", "endings_in_any_order"),
        ("shards", "none_begins_after_a_failure"),
        ("shards", "refused_behind_an_event"),
    ],
)
def test_the_parts_in_c_pass_their_checks(
    tmp_path_factory: pytest.TempPathFactory, source: str, name: str
) -> None:
    others = ("device/channel.c",) if source == "events" else ()
    folder = tmp_path_factory.mktemp(source)
    compiled(folder, f"tests/device/{source}_main.c", *others)(name)
