"""The bytes that a client over TCP requests ahead: networks are simulated, in virtual time."""

from __future__ import annotations

import pytest

from tests.support.compiled import Check, compiled


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    return compiled(tmp_path_factory.mktemp("flight"), "tests/tcp/flight_main.c", "tcp/flight.c")


@pytest.mark.parametrize(
    "name",
    [
        *("far", "near_or_slow", "beyond", "pace_of_the_program", "becomes_slow", "refused"),
        *("no_time", "drained"),
    ],
)
def test_flight(check: Check, name: str) -> None:
    check(name)
