"""Child processes that report what they do, and whose failures are never lost.

A worker talks to the demo over one pipe. Whatever goes wrong (an exception, a killed process, a
long silence) surfaces as WorkerFailed in the demo, with the reason; and no worker outlives it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self


class WorkerFailed(Exception):
    """A worker did not do what was asked; the message says which, and why."""


@dataclass(frozen=True)
class Progress:
    """A line for whoever watches."""

    text: str


@dataclass(frozen=True)
class Piece:
    """Generated text, as it comes."""

    text: str


@dataclass(frozen=True)
class Answer:
    """What the demo waits for."""

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


def _work(run: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]) -> None:
    """What a worker process does: `run`, and tell how it failed if it did."""
    # Ctrl-C reaches every process of the terminal; the demo alone decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(Channel(connection), *arguments)
    except (EOFError, BrokenPipeError):
        sys.exit(1)  # the demo is gone: there is nobody to tell
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        connection.send(Failure(reason, traceback.format_exc()))
        sys.exit(1)


@dataclass(eq=False)
class Worker:
    """The demo's end."""

    name: str
    process: multiprocessing.process.BaseProcess
    connection: Connection

    def send(self, value: Any) -> None:
        try:
            self.connection.send(value)
        except OSError:
            # It is gone. What it said before that is told by whoever waits for its answer.
            self.process.join(1)

    def end(self) -> WorkerFailed:
        self.process.join(1)
        code = self.process.exitcode
        how = "closed its pipe" if code is None else f"exited with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return WorkerFailed(f"{self.name} (pid {self.process.pid}) {how} before it was done")


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

    def start(self, name: str, run: Callable[..., None], *arguments: Any) -> Worker:
        """Start `run(channel, *arguments)` in a new process; nothing is inherited from this one."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(run, theirs, arguments), name=name, daemon=True
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
            WorkerFailed: one of them failed, died or, all of them, fell silent.
        """
        while True:
            connections: dict[Any, Worker] = {it.connection: it for it in self._workers}
            # A closed pipe is ready too, so that a death is seen at once, after the last words.
            ready = wait(list(connections), self._timeout)
            if not ready:
                raise WorkerFailed(
                    f"no word from any process for {self._timeout:g} seconds, waiting for "
                    f"{worker.name} (pid {worker.process.pid}); --timeout sets the limit"
                )
            for connection in ready:
                other = connections[connection]
                message = self._next_message(other)
                if message is not None and other is worker:
                    return message.value

    def _next_message(self, worker: Worker) -> Answer | None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            raise worker.end() from None
        match message:
            case Answer():
                return message
            case Progress(text):
                self._on_progress(worker.name, text)
            case Piece(text):
                self._on_piece(text)
            case Failure(reason, trace):
                raise WorkerFailed(
                    f"{worker.name} (pid {worker.process.pid}) failed: {reason}\n\n{trace}"
                )
        return None

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
        # BLAS reads this when a worker loads it. More threads than this gain nothing at this size,
        # and the same number everywhere keeps the sums, and so the token ids, the same.
        threads = str(min(4, len(os.sched_getaffinity(0))))
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, threads)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
