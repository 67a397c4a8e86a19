"""Names that programs import from `.utils` and `.status`: checks, log, statuses."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvplan.llm_datadist import LLMException, LLMStatusCode, Status
from kvplan.llm_datadist import status as statuses
from kvplan.llm_datadist.utils import log, utils
from tests.support.refusals import refused

WIDTHS: list[tuple[Callable[[str, object], None], int, int]] = [
    (utils.check_uint8, 0, 2**8 - 1),
    (utils.check_uint16, 0, 2**16 - 1),
    (utils.check_uint32, 0, 2**32 - 1),
    (utils.check_uint64, 0, 2**64 - 1),
    (utils.check_int32, -(2**31), 2**31 - 1),
    (utils.check_int64, -(2**63), 2**63 - 1),
]


@pytest.mark.parametrize(("check", "low", "high"), WIDTHS)
def test_an_integer_is_checked_at_both_ends_of_its_range(
    check: Callable[[str, object], None], low: int, high: int
) -> None:
    for number in (low, high):
        check("n", number)
    for number in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"n={number} is out of range \[{low}, {high}\]"):
            check("n", number)
    for other in (None, 1.0, "1", True):
        with pytest.raises(TypeError, match="only support"):
            check("n", other)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (utils.check_list_int32, -(2**31), 2**31),
        (utils.check_list_int64, -(2**63), 2**63),
        (utils.check_list_uint64, 2**64 - 1, -1),
    ],
)
def test_the_range_of_each_element_is_checked(
    check: Callable[[str, list[Any]], None], good: int, bad: int
) -> None:
    check("n", [good, 1])
    with pytest.raises(ValueError, match="n="):
        check("n", [good, bad])
    for wrong in (None, 3.0, True):  # also between other numbers
        with pytest.raises(TypeError):
            check("n", [good, wrong, 1])


def test_a_missing_value_has_a_default() -> None:
    assert utils.check_positive_or_set_default("n", None) == -1
    assert utils.check_positive_or_set_default("n", None, 7) == 7
    assert utils.check_positive_or_set_default("n", 0, 7) == 0
    with pytest.raises(ValueError, match="n=-1"):
        utils.check_positive_or_set_default("n", -1)
    with pytest.raises(TypeError):
        utils.check_positive_or_set_default("n", "1")  # type: ignore[arg-type]


def test_a_type_is_one_of_several() -> None:
    assert utils.check_isinstance("a", 1, [str, int]) == 1
    assert utils.check_isinstance("a", None, str) is None
    assert utils.check_isinstance("a", ["x"], [list, tuple], str) == ["x"]
    with pytest.raises(TypeError, match=r"a=1\.5: a only supports str or int, not float"):
        utils.check_isinstance("a", 1.5, [str, int])
    with pytest.raises(TypeError, match=r"^The first a=None"):
        utils.check_isinstance("a", None, str, extra_fmt="The first ", allow_none=False)
    with pytest.raises(TypeError, match="a holds 1: its inner type only supports str, not int"):
        utils.check_isinstance("a", ["x", 1], list, str)


def test_a_dict_has_keys_values_and_elements_of_types() -> None:
    utils.check_dict("a", {1: [2]}, int, list, int)
    for wrong in ({"1": [2]}, {1: 2}, {1: ["2"]}):
        with pytest.raises(TypeError, match="only support"):
            utils.check_dict("a", wrong, int, list, int)


def test_a_message_shortens_the_value_that_it_shows() -> None:
    with pytest.raises(TypeError) as raised:
        utils.check_isinstance("a", "x" * 10_000, int)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("code", LLMStatusCode)
def test_a_number_becomes_its_status(code: LLMStatusCode) -> None:
    known = code >= 0
    assert statuses.code_2_status(int(code)) is (code if known else LLMStatusCode.LLM_FAILED)
    assert Status(code).is_ok() is (code is LLMStatusCode.LLM_SUCCESS)
    assert Status(code).status_code is code


@pytest.mark.parametrize("number", [7, 0x5010B014, 0x5010B017])
def test_an_unknown_number_is_a_failure(number: int) -> None:
    assert statuses.code_2_status(number) is LLMStatusCode.LLM_FAILED


def test_a_returned_failure_is_raised() -> None:
    statuses.handle_llm_status(0, "f", "x")
    with refused(LLMStatusCode.LLM_TIMEOUT, r"f: LLMStatusCode\.LLM_TIMEOUT, x = 1"):
        statuses.handle_llm_status(int(LLMStatusCode.LLM_TIMEOUT), "f", "x = 1")


def test_a_condition_is_raised_with_its_text() -> None:
    statuses.raise_if_false(True, "a")
    statuses.raise_if_true(False, "a")
    with refused(LLMStatusCode.LLM_PARAM_INVALID, "a 1 2"):
        statuses.raise_if_false(False, "a {0} {b}", 1, b=2)
    with refused(LLMStatusCode.LLM_TIMEOUT):
        statuses.raise_if_true(True, "a", status_code=LLMStatusCode.LLM_TIMEOUT)


def test_braces_in_a_finished_text_are_data() -> None:
    with pytest.raises(LLMException, match=r"options = \{'a': 1\}"):
        statuses.raise_if_false(False, f"options = { {'a': 1} }")


def test_a_record_names_its_logger(caplog: pytest.LogCaptureFixture) -> None:
    log.error("a %s", 1)
    log.get_logger().error("b")
    assert [
        (record.getMessage(), record.funcName, Path(record.pathname).name)
        for record in caplog.records
    ] == [(text, "test_a_record_names_its_logger", Path(__file__).name) for text in ("a 1", "b")]


def test_the_caller_is_found_from_any_depth() -> None:
    found = []
    thread = Thread(target=lambda: found.append(log._find_caller(stack_info=True)))
    thread.start()
    thread.join()
    ((file, line, function, stack),) = found
    assert (file, function) == (__file__, "<lambda>")
    assert line > 0
    assert stack is not None
    assert "found.append" in stack
    assert log._find_caller(stack_level=10_000)[3] is None


def test_a_handler_that_raises_ends_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    """Threads on which others depend write to this log."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left")

    broken = Broken()
    log.get_logger().addHandler(broken)
    try:
        log.error("said %s", "it")
    finally:
        log.get_logger().removeHandler(broken)
    output = capsys.readouterr()
    assert "no space left" in output.err
    assert "test_a_handler_that_raises_ends_no_thread: said it" in output.out


def test_the_logger_is_made_once() -> None:
    assert log.get_logger() is log.get_logger() is logging.getLogger("LLM_DATADIST")
    assert len(log.get_logger().handlers) == 1


@pytest.mark.parametrize(
    ("level", "lines"),
    [("0", "iwe"), ("1", "iwe"), ("2", "we"), ("3", "e"), ("x", "e"), (None, "e")],
)
def test_the_environment_sets_the_level_of_standard_output(level: str | None, lines: str) -> None:
    code = (
        "from kvplan.llm_datadist.utils import log\n"
        "log.info('i'), log.warn('w'), log.error('%s', 'e')"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    if level is not None:
        environment["ASCEND_GLOBAL_LOG_LEVEL"] = level
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert [line[-1] for line in process.stdout.splitlines()] == list(lines)
    assert "LLM_DATADIST(" in process.stdout
    assert "[<string>:2]" in process.stdout
    assert process.stderr == ""
