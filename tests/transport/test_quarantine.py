"""Memory that a peer may still write to stays held; a slot has one registration or lease."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from kvplan.transport.registrations import Quarantine, Slots

DEADLINE_S = 30


class Memory:
    """Memory that records its release."""

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


def test_a_check_that_fails_holds_only_its_own_memory(
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


def test_no_slot_is_a_registration_and_a_lease() -> None:
    slots = Slots(3, 8, 2)
    for _ in range(2):  # the second time, all slots are free again
        taken = [slots.take() for _ in range(3)]
        leases = [slots.take(is_lease=True) for _ in range(2)]
        assert {slot for slot, _ in taken} == {0, 1, 2}
        assert {slot for slot, _ in leases} == {3, 4}
        assert sorted(slots.leases()) == sorted(leases)
        for is_lease in (False, True):
            with pytest.raises(MemoryError):
                slots.take(is_lease)
        for lease in (*taken, *leases):
            slots.release(*lease)
            with pytest.raises(ValueError, match="generation"):
                slots.release(*lease)
