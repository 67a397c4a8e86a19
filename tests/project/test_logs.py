"""Log lines of this package name their logger."""

import logging

import pytest

from kvplan.logs import Log


def test_a_record_names_its_logger(caplog: pytest.LogCaptureFixture) -> None:
    log = Log("kvplan.some")
    with caplog.at_level(logging.INFO, "kvplan.some"):
        log.info("a %s", "b")
        log.log(logging.INFO, "c")
        try:
            int("why")
        except ValueError:
            log.exception("d")
    assert [it.getMessage() for it in caplog.records] == ["a b", "c", "d"]
    assert {it.funcName for it in caplog.records} == {"test_a_record_names_its_logger"}
    assert "why" in caplog.text
