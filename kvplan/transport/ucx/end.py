"""This process's end of all links over UCX: made when it is first needed, which takes 0.4 s."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvnative._backend import NativeError
from kvplan.execution.outcome import status_code_of
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvnative._ucx import UcxEnd
    from kvplan.transport.ucx.library import Found
    from kvplan.transport.ucx.modes import Mode

_LOG = Log("kvplan")
_LEAVING_S = 2.0  # for calls that are under way when the end is closed


class LazyEnd:
    """A UCX context with its worker and its thread, as soon as somebody needs them.

    Args:
        found: the library.
        mode: how bytes move.
        settings: of UCX, without their prefix.
        max_ranges: registrations that there can be.
        name: that UCX's own tools show.
        opened: told of the native end before anybody else uses it.
    """

    def __init__(
        self,
        found: Found,
        mode: Mode,
        settings: Mapping[str, str],
        max_ranges: int,
        name: str,
        opened: Callable[[UcxEnd], None],
    ) -> None:
        self.found = found
        self.mode = mode
        self._settings = settings
        self._max_ranges = max_ranges
        self._name = name
        self._opened = opened
        self._opening = threading.RLock()  # re-entrant: a signal handler may close it
        self._native: UcxEnd | None = None
        self._failure: LLMException | None = None
        self._version = ""
        self._left = threading.Condition(threading.RLock())
        self._inside = 0  # calls that use the native end
        self._closed = False

    @property
    def native(self) -> UcxEnd | None:
        """The native end, if it was made and not closed yet."""
        return self._native

    @property
    def version(self) -> str:
        """Of UCX, such as "1.22.0"; empty while it is not loaded."""
        return self._version

    @property
    def failure(self) -> LLMException | None:
        """Why it could not be made, if that was tried."""
        return self._failure

    def open(self) -> UcxEnd:
        """The native end, made by now; who comes meanwhile waits.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: the library cannot be used;
                LLM_PARAM_INVALID: a setting that UCX does not know, or otherwise what UCX says.
        """
        with self._opening:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if self._native is None:
                if self._closed:
                    raise transport_closed()
                try:
                    native = self._make()
                except LLMException as error:
                    self._failure = error
                    raise
                self._opened(native)
                self._native = native
            return self._native

    @contextmanager
    def use(self) -> Iterator[UcxEnd]:
        """As `open`; it is not closed as long as the caller is inside."""
        native = self.open()
        with self._left:
            if self._closed:
                raise transport_closed()
            self._inside += 1
        try:
            yield native
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()

    def close(self) -> None:
        """Take it down; who is inside must be about to leave. Idempotent."""
        with self._left:
            if self._closed:
                return
            self._closed = True
            is_left = self._left.wait_for(lambda: not self._inside, _LEAVING_S)
        with self._opening:
            native, self._native = self._native, None  # its sockets go with its last user
        if native is None:
            return
        if is_left:
            native.close()
        else:  # it goes with its last user
            _LOG.warning("event=closes_late transport=ucx")

    def _make(self) -> UcxEnd:
        from kvnative._ucx import UcxEnd, UcxLibrary  # most engines never need them

        try:
            library = UcxLibrary.load(self.found.path)
        except NativeError as error:
            raise LLMException(
                f"the UCX library {self.found.path} ({self.found.source}) cannot be used: {error}",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            ) from error
        self._version = ".".join(map(str, library.version))
        try:
            return UcxEnd(
                library,
                mode=self.mode,
                settings=self._settings,
                max_ranges=self._max_ranges,
                name=self._name,
            )
        except NativeError as error:
            raise ucx_error(
                error, f"UCX {self._version} ({self.found.path}) cannot be used {self.mode}"
            ) from error


def ucx_error(error: NativeError, what: str) -> LLMException:
    """An error of the native layer as one of the interface; `what` begins its message."""
    status = getattr(error, "status", None)
    return LLMException(f"{what}: {error}", status_code=status_code_of(status))


def transport_closed() -> LLMException:
    """The transport was closed."""
    return LLMException("the transport is closed")
