"""Log lines of this package name their logger."""

import logging
import re
import select
import time

import pytest

from kvplan.system.logs import LimitedLog, Log


def test_a_record_names_its_logger(caplog: pytest.LogCaptureFixture) -> None:
    log = Log("kvplan.some")
    with caplog.at_level(logging.INFO, "kvplan.some"):
        log.info("a %s", "b")
        log.log(logging.INFO, "c")
        try:
            int("why")
        except ValueError:
            log.exception("d")
    assert [record.getMessage() for record in caplog.records] == ["a b", "c", "d"]
    assert {record.funcName for record in caplog.records} == {"test_a_record_names_its_logger"}
    assert "why" in caplog.text


def test_one_line_a_second_of_each_kind_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A limited log writes one line of each kind a second.

    The next line counts the suppressed ones.
    """
    limited, calls, end = LimitedLog(Log("kvplan.some")), 0, time.monotonic() + 20

    def lines(kind: str) -> list[re.Match[str]]:
        found = (
            re.fullmatch(rf"cluster (\d+) {kind}(?: unlogged=(\d+))?", line)
            for line in caplog.messages
        )
        return [match for match in found if match]

    with caplog.at_level(logging.WARNING, "kvplan.some"):
        while not all(lines(kind)[-1:] and lines(kind)[-1][2] for kind in ("floods", "lies")):
            for _ in range(1000):
                limited.warning("cluster %d floods", calls)
                limited.warning("cluster %d lies", calls)
                calls += 1
            assert time.monotonic() < end
            # waits for the second to pass, and leaves the core to others
            select.select([], [], [], 0.05)
    assert limited.count == 2 * calls
    for kind in ("floods", "lies"):
        found = lines(kind)
        assert found[0][0] == f"cluster 0 {kind}"
        assert sum(1 + int(line[2] or 0) for line in found) == int(found[-1][1]) + 1
    assert (
        len(caplog.records) * 100 < limited.count
    )  # one line a second of each kind, even on a slow machine
    assert {record.funcName for record in caplog.records} == {
        "test_one_line_a_second_of_each_kind_is_logged"
    }
