"""The expectation that a call is refused with a status and a message."""

from __future__ import annotations

from types import TracebackType

import pytest

from kvplan import LLMException, LLMStatusCode


class refused:  # noqa: N801 - it stands where pytest.raises does
    """A block that must raise an LLMException of this status, which may be given by name.

    It yields what pytest.raises yields. It is not a generator, whose frame would keep the error,
    and with it the caller's objects, until the next garbage collection.
    """

    def __init__(self, status: LLMStatusCode | str, match: str | None = None) -> None:
        self._status = LLMStatusCode[status] if isinstance(status, str) else status
        self._raises = pytest.raises(LLMException, match=match)

    def __enter__(self) -> pytest.ExceptionInfo[LLMException]:
        self._caught = self._raises.__enter__()
        return self._caught

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        __tracebackhide__ = True
        expected = self._raises.__exit__(kind, error, traceback)
        if expected:
            found = self._caught.value
            assert found.status_code is self._status, f"{found} is not {self._status.name}"
        return expected
