"""Pairs of processes with one library, on one host or in two namespaces, for the paged work."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from benchmarks.table import Unmeasured
from tools.namespaces import NamespacesError, namespaces

PATIENCE_S = 120
"""Seconds of silence after which an end counts as hung."""


class Starts(Protocol):
    """`subprocess.Popen`, or `Namespace.start`."""

    def __call__(self, *argv: str, **arguments: Any) -> subprocess.Popen[str]: ...


@dataclass(frozen=True)
class Place:
    """The hosts of the two ends.

    Attributes:
        name: name in the tables.
        serving, moving: address of each end.
        interface: network interface that joins them.
        start_serving, start_moving: start a process at each end.
    """

    name: str
    serving: str
    moving: str
    interface: str
    start_serving: Starts
    start_moving: Starts


def _start(*argv: str, **arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, **arguments)


LOOPBACK = Place("loopback", "127.0.0.1", "127.0.0.1", "lo", _start, _start)


@contextmanager
def veth() -> Iterator[Place]:
    """Yield two namespaces that a veth pair joins.

    Raises:
        Unmeasured: namespaces cannot be made here.
    """
    with ExitStack() as opened:
        try:
            serving, moving = opened.enter_context(namespaces(2))
        except NamespacesError as error:
            raise Unmeasured(str(error)) from error
        ends = serving.address, moving.address
        yield Place("veth", *ends, moving.interface, serving.start, moving.start)


@dataclass(frozen=True)
class Library:
    """The commands of the two ends of one library, with one choice of settings.

    Attributes:
        name: name in the tables.
        settings: description of the settings.
        serve: command of the serving end.
        move: returns the command of the moving end, given the line that the serving end printed.
        environment: additional environment variables of both ends.
        spins: True if both ends spin while idle. They are then stopped between their turns, to
            leave the cores to the other library.
    """

    name: str
    settings: str
    serve: Sequence[str]
    move: Callable[[str], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    spins: bool = False


class Pair:
    """Both ends of a library, running. A context manager."""

    def __init__(self, library: Library, place: Place) -> None:
        self.library = library
        self._opened = ExitStack()
        with ExitStack() as opened:
            self._server = self._end(opened, place.start_serving, library.serve)
            self.serving_says = self._answer(self._server)
            move = library.move(self.serving_says)
            self._mover = self._end(opened, place.start_moving, move)
            self._opened = opened.pop_all()
        self._turn(False)

    def _end(self, opened: ExitStack, start: Starts, command: Sequence[str]) -> _End:
        said = opened.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        process = start(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            bufsize=1,
            env={**os.environ, **self.library.environment},
        )
        opened.enter_context(process)
        opened.callback(process.kill)
        return _End(process, said)

    def _answer(self, end: _End) -> str:
        line = end.line()
        if not line:
            raise RuntimeError(f"{self.library.name}: {end.last_words()}")
        return line

    def seconds(self, word: str, number: int) -> float:
        """Return the answer of the moving end to a line such as "pull BLOCKS".

        Raises:
            RuntimeError: the end died or hangs; the message has its last output.
        """
        stdin = self._mover.process.stdin
        assert stdin is not None
        self._turn(True)
        with suppress(BrokenPipeError):  # reported below, with its last output
            print(word, number, file=stdin, flush=True)
        answer = json.loads(self._answer(self._mover))
        self._turn(False)
        self.settings = answer.get("settings", self.library.settings)
        seconds: float = answer["seconds"]
        return seconds

    def _turn(self, begins: bool) -> None:
        if self.library.spins:
            for end in (self._server, self._mover):
                end.process.send_signal(signal.SIGCONT if begins else signal.SIGSTOP)

    @property
    def pids(self) -> tuple[int, int]:
        """Return the process ids of the serving and the moving end."""
        return self._server.process.pid, self._mover.process.pid

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()


@dataclass(frozen=True)
class _End:
    process: subprocess.Popen[str]
    said: IO[str]

    def line(self) -> str:
        """Return the next line of the output; empty at its end."""
        stdout = self.process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            ready = selector.select(PATIENCE_S)
        return stdout.readline().strip() if ready else ""

    def last_words(self) -> str:
        """Describe the state of a silent end, with its last output."""
        code = self.process.poll()
        state = f"says nothing for {PATIENCE_S} s" if code is None else f"ended with {code}"
        self.said.seek(0)
        return f"an end {state}: {self.said.read()[-1000:].strip()}"
