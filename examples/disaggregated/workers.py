"""Child processes that report what they do, and whose failures are never lost.

A worker talks to the demo over one pipe. Whatever goes wrong (an exception, a killed process, a
long silence) surfaces as WorkerError in the demo, with the reason; and no worker outlives it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from .hosts import HERE, Host


class WorkerError(Exception):
    """A worker did not do what was asked; the message says which, and why."""


@dataclass(frozen=True)
class Progress:
    """Print a line for the user."""

    text: str


@dataclass(frozen=True)
class Piece:
    """Generated text, as it comes."""

    text: str


@dataclass(frozen=True)
class Answer:
    """An answer that the demo waits for."""

    value: Any


@dataclass(frozen=True)
class Failure:
    reason: str
    traceback: str


class Channel:
    """A worker's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def progress(self, text: str) -> None:
        self._connection.send(Progress(text))

    def piece(self, text: str) -> None:
        self._connection.send(Piece(text))

    def answer(self, value: Any) -> None:
        self._connection.send(Answer(value))

    def receive(self) -> Any:
        return self._connection.recv()


def _work(module: str, connection: Connection, arguments: tuple[Any, ...], host: Host) -> None:
    """Run the module's `run` in a worker process, and report its failure."""
    # Ctrl-C reaches every process of the terminal; the demo alone decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        host.enter()
        import_module(module).run(Channel(connection), *arguments)
    except (EOFError, BrokenPipeError):
        sys.exit(1)  # the demo is gone: no process waits for a report
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            connection.send(Failure(reason, traceback.format_exc()))
        sys.exit(1)


@dataclass(eq=False)
class Worker:
    """The demo's end."""

    name: str
    process: multiprocessing.process.BaseProcess
    connection: Connection
    answers: deque[Answer] = field(default_factory=deque)  # that came while another's was awaited

    def send(self, value: Any) -> None:
        # If it is gone, that and its last output are reported where its answer is awaited.
        with suppress(OSError):
            self.connection.send(value)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.process.pid})"


class Workers:
    """Starts workers, waits for their answers, and stops them all when it is left.

    Args:
        on_progress: called with a worker's name and a line.
        on_piece: called with generated text.
        timeout: seconds without a word from any worker after which they count as stuck.
    """

    def __init__(
        self,
        on_progress: Callable[[str, str], None],
        on_piece: Callable[[str], None],
        timeout: float,
    ) -> None:
        self._on_progress = on_progress
        self._on_piece = on_piece
        self._timeout = timeout
        self._workers: list[Worker] = []

    def start(self, name: str, module: str, *arguments: Any, host: Host = HERE) -> Worker:
        """Start `run(channel, *arguments)` of `module` in a new process that inherits nothing."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(module, theirs, arguments, host), name=name, daemon=True
        )
        process.start()
        theirs.close()  # so that a dead worker reads as end of file
        worker = Worker(name, process, ours)
        self._workers.append(worker)
        self._on_progress(name, f"process {process.pid} started")
        return worker

    def answer(self, worker: Worker) -> Any:
        """Wait for the next answer of `worker`; meanwhile show what any of them reports.

        Raises:
            WorkerError: one of them failed, died or, all of them, fell silent.
        """
        while not worker.answers:
            connections: dict[Any, Worker] = {item.connection: item for item in self._workers}
            if worker.connection not in connections:
                raise WorkerError(f"{worker} ended without an answer")
            # A closed pipe is ready too, so that a death is seen at once, after the last words.
            ready = wait(list(connections), self._timeout)
            if not ready:
                raise WorkerError(
                    f"no word from any process for {self._timeout:g} seconds, waiting for "
                    f"{worker}; --timeout sets the limit"
                )
            for connection in ready:
                other = connections[connection]
                message = self._next_message(other)
                if message is not None:
                    other.answers.append(message)
        return worker.answers.popleft().value

    def _next_message(self, worker: Worker) -> Answer | None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._ended(worker)
            return None
        match message:
            case Answer():
                return message
            case Progress(text):
                self._on_progress(worker.name, text)
            case Piece(text):
                self._on_piece(text)
            case Failure(reason, trace):
                raise WorkerError(f"{worker} failed: {reason}\n\n{trace}")
        return None

    def _ended(self, worker: Worker) -> None:
        """Forget a worker whose work is done.

        Raises:
            WorkerError: it ended otherwise.
        """
        worker.process.join(self._timeout)
        code = worker.process.exitcode
        if code is None:
            raise WorkerError(f"{worker} closed its pipe, but runs on")
        if code < 0:
            raise WorkerError(f"{worker} was killed by {signal.Signals(-code).name}")
        if code > 0:
            raise WorkerError(f"{worker} exited with status {code}")
        worker.connection.close()
        self._workers.remove(worker)

    def stop(self, grace: float = 2.0) -> None:
        """Stop every worker that still runs, the stubborn ones too."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.terminate()
        deadline = time.monotonic() + grace
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()

    def __enter__(self) -> Self:
        # BLAS reads these when a worker loads it. Several of its threads wait for each other by
        # spinning: on a busy machine that makes this model ten times slower, not twice as fast.
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
