"""A transport whose connection both ends must renew: `local` with a pretended connection."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.local import LocalTransport
from tests.links.end import DEADLINE_S


class Meeting:
    """A place where both sides of a connection wait for each other, by session and generation."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.there: defaultdict[tuple[bytes, int], int] = defaultdict(int)
        self.given_up: set[tuple[bytes, int]] = set()

    def attend(self, key: tuple[bytes, int], gives_up: Callable[[], bool]) -> bool:
        """Return True if both sides came."""
        with self.changed:
            self.there[key] += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.there[key] == 2 or gives_up(), DEADLINE_S)
            return self.there[key] == 2


class Connection:
    """A connection that records its calls, and fails as a test wants."""

    def __init__(self, meeting: Meeting, session: bytes) -> None:
        self.request_renewal: Callable[[float | None], None] | None = None
        self.notify_unused: Callable[[int], None] = lambda generation: None
        self.current = 0
        self.opened: list[int] = []
        self.making: list[int] = []  # generations with a call of `renew`
        self.made: list[int] = []
        self.abandoned: list[int] = []
        self.unused_there: list[int] = []
        self.refusal: LLMException | None = None
        self.open_refusal: Exception | None = None
        self.begins = threading.Event()  # while cleared, `open` waits
        self.begins.set()
        self.holds = threading.Event()  # while cleared, `renew` waits
        self.holds.set()
        self._meeting = meeting
        self._session = session

    def key(self, generation: int) -> tuple[bytes, int]:
        return self._session, generation

    def open(self, generation: int) -> bytes:
        with self._meeting.changed:
            self.opened.append(generation)
            self._meeting.changed.notify_all()
        assert self.begins.wait(DEADLINE_S)
        if self.open_refusal is not None:
            raise self.open_refusal
        return b"newest"

    def renew(self, generation: int, *, timeout_ms: float) -> None:
        assert 1_000 < timeout_ms < 120_000  # a few seconds, in milliseconds
        with self._meeting.changed:
            self.making.append(generation)
            self._meeting.changed.notify_all()
        assert self.holds.wait(DEADLINE_S)
        if self.refusal is not None:
            raise self.refusal
        key = self.key(generation)
        if not self._meeting.attend(key, lambda: generation in self.abandoned):
            raise LLMException("given up", status_code=LLMStatusCode.LLM_LINK_FAILED)
        self.made.append(generation)

    def adopt(self, generation: int, metadata: bytes) -> None:
        assert metadata == b"newest"
        assert generation in self.made
        assert generation > self.current
        with self._meeting.changed:
            self.current = generation
            self._meeting.changed.notify_all()

    def abandon(self, generation: int) -> None:
        with self._meeting.changed:
            self.abandoned.append(generation)
            self._meeting.changed.notify_all()

    def unused(self, generation: int) -> None:
        with self._meeting.changed:
            self.unused_there.append(generation)
            self._meeting.changed.notify_all()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        with self._meeting.changed:
            assert self._meeting.changed.wait_for(holds, DEADLINE_S)


class _Link:
    """A local link with such a connection."""

    def __init__(self, link: Any, renewable: Connection) -> None:
        self._link = link
        self.renewable = renewable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class RenewingTransport(LocalTransport):
    """A transport whose connections meet those of transports with the same `Meeting`."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self._meeting = meeting
        self.connections: list[Connection] = []

    def refusal(self, metadata: bytes) -> None:
        return None

    def connect(self, metadata: bytes, **given: Any) -> Any:
        link = super().connect(metadata, **given)
        session = given.get("session", b"")
        assert session
        self.connections.append(Connection(self._meeting, session))
        return _Link(link, self.connections[-1])
