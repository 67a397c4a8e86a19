"""This process's ends of all links over UCX: made when first needed, which takes 0.4 s."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvnative._backend import NativeError
from kvplan.execution.outcome import status_code_of
from kvplan.inspection.units import plural
from kvplan.logs import Log
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.ucx import files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvnative._ucx import UcxEnd
    from kvplan.transport.ucx.library import Found
    from kvplan.transport.ucx.modes import Mode

    Natives = tuple[UcxEnd, ...]

_LOG = Log("kvplan")
_LEAVING_S = 2.0  # for calls that are under way when the end is closed


class LazyEnds:
    """An end for each lane, as soon as somebody needs them: a UCX context, and a thread.

    Args:
        found: the library.
        lanes: how many.
        mode: how bytes move.
        settings: of UCX, without their prefix.
        max_ranges: registrations that there can be.
        name: that UCX's own tools show.
        opened: told of the native ends before anybody else uses them.
    """

    def __init__(
        self,
        found: Found,
        lanes: int,
        mode: Mode,
        settings: Mapping[str, str],
        max_ranges: int,
        name: str,
        opened: Callable[[Natives], None],
    ) -> None:
        self.found = found
        self.lanes = lanes
        self.mode = mode
        self._settings = settings
        self._max_ranges = max_ranges
        self._name = name
        self._opened = opened
        self._opening = threading.RLock()  # re-entrant: a signal handler may close it
        self._natives: Natives = ()
        self._failure: LLMException | None = None
        self._version = ""
        self._left = threading.Condition(threading.RLock())
        self._inside = 0  # calls that use the native ends
        self._being_made = 0  # links, by some of those
        self._closed = False

    @property
    def natives(self) -> Natives:
        """The native ends; empty unless they were made and are not closed yet."""
        return self._natives

    @property
    def version(self) -> str:
        """Of UCX, such as "1.22.0"; empty while it is not loaded."""
        return self._version

    @property
    def failure(self) -> LLMException | None:
        """Why they could not be made, if that was tried."""
        return self._failure

    def open(self) -> Natives:
        """The native ends, made by now; who comes meanwhile waits.

        Raises:
            LLMException: LLM_FEATURE_NOT_ENABLED: the library cannot be used;
                LLM_PARAM_INVALID: a setting that UCX does not know, or otherwise what UCX says; all
                these for good. LLM_LINK_FAILED: too few file descriptors are left now.
        """
        with self._opening:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if not self._natives:
                if self._closed:
                    raise transport_closed()
                # UCX would say that it finds no network.
                self._check_files()
                try:
                    natives = self._make()
                except LLMException as error:
                    self._check_files()  # others may have taken them meanwhile
                    self._failure = error
                    raise
                self._opened(natives)
                self._natives = natives
            return self._natives

    def no_room(self) -> LLMException | None:
        """Why there cannot be a link more now; None: there can.

        Whoever is reached without room may never be reached again: see `files`.
        """
        return files.too_few(files.for_links(1, self.lanes), "1 link")

    @contextmanager
    def making(self, lanes: int, give_up: float) -> Iterator[None]:
        """The caller, who is within `use`, makes a link.

        Where there may not be room for all that are being made at once it waits for the others.

        Args:
            lanes: of the link.
            give_up: when waiting ends, of `time.monotonic`.

        Raises:
            LLMException: LLM_LINK_FAILED: there is no room.
        """
        with self._left:
            while True:
                if self._closed:
                    raise transport_closed()
                links = self._being_made + 1
                few = files.too_few(files.for_links(links, lanes), plural(links, "link"))
                if few is None:
                    break
                left = give_up - time.monotonic()
                if not self._being_made or left <= 0 or not self._left.wait(left):
                    raise few
            self._being_made += 1
        try:
            yield
        finally:
            with self._left:
                self._being_made -= 1
                self._left.notify_all()

    @contextmanager
    def use(self) -> Iterator[Natives]:
        """As `open`; they are not closed as long as the caller is inside."""
        natives = self.open()
        with self._left:
            if self._closed:
                raise transport_closed()
            self._inside += 1
        try:
            yield natives
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()

    def close(self) -> None:
        """Take them down; who is inside must be about to leave. Idempotent."""
        with self._left:
            if self._closed:
                return
            self._closed = True
            self._left.notify_all()
            is_left = self._left.wait_for(lambda: not self._inside, _LEAVING_S)
        with self._opening:
            natives, self._natives = self._natives, ()  # their sockets go with their last users
        if not is_left and natives:  # they go with their last user
            _LOG.warning("event=closes_late transport=ucx")
            return
        _close(natives)

    def _check_files(self) -> None:
        if (few := files.too_few(files.for_start(self.lanes), "a start")) is not None:
            raise few

    def _make(self) -> Natives:
        from kvnative._ucx import UcxEnd, UcxLibrary  # most engines never need them

        try:
            library = UcxLibrary.load(self.found.path)
        except NativeError as error:
            raise LLMException(
                f"the UCX library {self.found.path} ({self.found.source}) cannot be used: {error}",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            ) from error
        self._version = ".".join(map(str, library.version))
        made: list[UcxEnd] = []
        try:
            while len(made) < self.lanes:
                made.append(
                    UcxEnd(
                        library,
                        mode=self.mode,
                        settings=self._settings,
                        max_ranges=self._max_ranges,
                        name=self._name,
                    )
                )
        except NativeError as error:
            while made:  # the error is kept, and all that its traceback refers to
                made.pop().close()
            raise ucx_error(
                error, f"UCX {self._version} ({self.found.path}) cannot be used {self.mode}"
            ) from error
        return tuple(made)


def _close(natives: Natives) -> None:
    """At the same time: each waits for its peers to hear of it."""
    if len(natives) > 1:
        try:
            with ThreadPoolExecutor(len(natives)) as threads:
                list(threads.map(lambda it: it.close(), natives))
        except RuntimeError:  # no thread can be had; a second time is fine
            pass
        else:
            return
    for native in natives:
        native.close()


def ucx_error(error: NativeError, what: str) -> LLMException:
    """An error of the native layer as one of the interface; `what` begins its message."""
    status = getattr(error, "status", None)
    return LLMException(f"{what}: {error}", status_code=status_code_of(status))


def transport_closed() -> LLMException:
    """The transport was closed."""
    return LLMException("the transport is closed")
