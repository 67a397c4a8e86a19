"""Slots of registrations and leases, compared with a model that is a dict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.transport.registrations import Slots

COUNT, NUM_LEASES = 3, 4
OUTSIDE = (-1, COUNT + NUM_LEASES, 1 << 32)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_a_slot_has_one_generation_until_it_is_released(steps: list[tuple[bool, int]]) -> None:
    slots, model, used = Slots(COUNT, COUNT, NUM_LEASES), dict[int, int](), set[tuple[int, int]]()
    for is_lease, number in steps:
        places = range(COUNT, COUNT + NUM_LEASES) if is_lease else range(COUNT)
        if number < 6:
            if all(place in model for place in places):
                what = "4 leases" if is_lease else "3 registrations"
                with pytest.raises(MemoryError, match=f"all {what} are taken"):
                    slots.take(is_lease)
                continue
            slot, generation = slots.take(is_lease)
            assert slot in places
            assert slot not in model
            assert generation not in {other for _, other in used}
            model[slot] = generation
            used.add((slot, generation))
        elif model:
            slot = sorted(model)[number % len(model)]
            generation = model.pop(slot)
            slots.release(slot, generation)
            with pytest.raises(ValueError, match=f"slot {slot} does not have generation"):
                slots.release(slot, generation)
        for slot, generation in used:
            assert slots.holds(slot, generation) is (model.get(slot) == generation)
        assert not any(slots.holds(slot, 0) for slot in (*range(COUNT + NUM_LEASES), *OUTSIDE))
        assert not any(slots.holds(slot, each) for slot in OUTSIDE for _, each in used)
        assert sorted(slots.leases()) == sorted(
            (slot, generation) for slot, generation in model.items() if slot >= COUNT
        )
