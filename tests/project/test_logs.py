"""Log lines of this package name their logger."""

import logging

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


def test_one_line_of_each_kind_that_a_peer_causes_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limited = LimitedLog(Log("kvplan.some"))
    with caplog.at_level(logging.WARNING, "kvplan.some"):
        for number in range(1000):
            limited.warning("cluster %d floods", number)
            limited.warning("cluster %d lies", number)
    assert limited.count == 2000
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["cluster 0 floods", "cluster 0 lies"]
    assert len(lines) < 100  # one a second of each kind, on a machine that is slow
    assert {record.funcName for record in caplog.records} == {
        "test_one_line_of_each_kind_that_a_peer_causes_is_logged"
    }
