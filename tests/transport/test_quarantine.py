"""Memory that a peer may still write to stays held, whatever one of the questions raises."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from kvplan.transport.registrations import Quarantine

DEADLINE_S = 30


class Memory:
    """Memory that says when it is released."""

    def __init__(self, name: str, released: SimpleQueue[str]) -> None:
        self.name = name
        self.released = released

    def release(self) -> None:
        self.released.put(self.name)


def test_memory_is_held_until_no_peer_writes() -> None:
    quarantine, released = Quarantine(), SimpleQueue[str]()
    answers = iter([True, True, False])
    quarantine.add(lambda: next(answers), Memory("written", released))
    assert released.get(timeout=DEADLINE_S) == "written"
    assert next(answers, None) is None


def test_a_question_that_fails_holds_its_memory_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quarantine, released = Quarantine(), SimpleQueue[str]()

    def fails_once(answers: list[bool]) -> bool:
        if not answers:
            answers.append(False)
            raise OSError("no memory to ask with")
        return answers[0]

    said: list[bool] = []
    quarantine.add(lambda: fails_once(said), Memory("failed", released))
    quarantine.add(lambda: not said, Memory("behind", released))
    first, second = (released.get(timeout=DEADLINE_S) for _ in range(2))
    assert {first, second} == {"failed", "behind"}
    assert "no memory to ask with" in caplog.text
    quarantine.add(lambda: False, Memory("later", released))
    assert released.get(timeout=DEADLINE_S) == "later"
