"""Tests of workers: each failure is reported with its reason, and no worker is left behind."""

from __future__ import annotations

import pytest

from examples.disaggregated.workers import Worker, WorkerError, Workers

MISBEHAVING = "tests.demo.misbehaving"
PATIENCE = 60.0


class Received:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.text = ""

    def progress(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def piece(self, text: str) -> None:
        self.text += text


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
def workers(received: Received, monkeypatch: pytest.MonkeyPatch) -> Workers:
    # `Workers` sets variables that are not set; with these, pytest restores them.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    return Workers(received.progress, received.piece, PATIENCE)


def test_a_worker_reports_and_answers(workers: Workers, received: Received) -> None:
    with workers:
        worker = workers.start("w", MISBEHAVING, "answers")
        worker.send(41)
        assert workers.answer(worker) == 42
        assert worker.process.is_alive()
    assert received.lines == [("w", f"process {worker.process.pid} started"), ("w", "a line")]
    assert received.text == "a piece"
    assert not worker.process.is_alive()


def test_an_answer_is_kept_while_another_is_awaited(workers: Workers) -> None:
    with workers:
        early, late = (workers.start(name, MISBEHAVING, "answers") for name in ("early", "late"))
        early.send(1)
        early.send("the end")
        early.process.join(PATIENCE)  # then the answer is in the pipe
        late.send(2)
        assert [workers.answer(item) for item in (late, early)] == [3, 2]


@pytest.mark.parametrize(
    ("conduct", "reason"),
    [
        ("raises", r"w \(pid \d+\) failed: ValueError: the reason\n\nTraceback"),
        ("is killed", r"w \(pid \d+\) was killed by SIGKILL"),
        ("exits", r"w \(pid \d+\) exited with status 7"),
        ("just returns", r"w \(pid \d+\) ended without an answer"),
    ],
)
def test_a_failure_is_reported_with_its_reason(workers: Workers, conduct: str, reason: str) -> None:
    with workers, pytest.raises(WorkerError, match=reason):
        workers.answer(workers.start("w", MISBEHAVING, conduct))


def test_the_last_lines_before_a_death_are_read(workers: Workers, received: Received) -> None:
    with workers, pytest.raises(WorkerError, match="SIGKILL"):
        workers.answer(workers.start("w", MISBEHAVING, "is killed"))
    assert ("w", "last words") in received.lines


@pytest.mark.parametrize("conduct", ["is killed", "raises"])
def test_the_failure_of_one_ends_the_wait_for_another(workers: Workers, conduct: str) -> None:
    with workers:
        waiting = workers.start("waiting", MISBEHAVING, "answers")
        workers.start("failing", MISBEHAVING, conduct)
        with pytest.raises(WorkerError, match=r"^failing \(pid"):
            workers.answer(waiting)
    assert not waiting.process.is_alive()


def test_a_worker_that_ended_does_not_end_the_wait_for_another(workers: Workers) -> None:
    with workers:
        waiting = workers.start("waiting", MISBEHAVING, "answers")
        done = workers.start("done", MISBEHAVING, "just returns")
        done.process.join()
        waiting.send(1)
        assert workers.answer(waiting) == 2


def test_a_silent_worker_times_out(received: Received, workers: Workers) -> None:
    with Workers(received.progress, received.piece, timeout=0.3) as impatient:
        worker = impatient.start("w", MISBEHAVING, "falls silent")
        with pytest.raises(WorkerError, match=r"no word .* for 0\.3 seconds, waiting for w"):
            impatient.answer(worker)
    assert not worker.process.is_alive()


def test_a_worker_that_ignores_sigterm_is_killed(workers: Workers) -> None:
    with workers:
        worker = workers.start("w", MISBEHAVING, "does not stop")
        assert workers.answer(worker) == "ready"
        workers.stop(grace=0.1)
    assert worker.process.exitcode == -9


def test_a_failed_import_is_reported(workers: Workers) -> None:
    with workers, pytest.raises(WorkerError, match=r"ModuleNotFoundError: .*no_such_module"):
        workers.answer(workers.start("w", "tests.demo.no_such_module"))


def test_workers_end_if_an_exception_leaves_their_block(workers: Workers) -> None:
    worker: Worker | None = None

    def interrupted() -> None:
        nonlocal worker
        with workers:
            worker = workers.start("w", MISBEHAVING, "falls silent")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert worker is not None
    assert not worker.process.is_alive()
