"""Lists of descriptors become tensors of blocks, equal to the tensors that they were made of."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvplan.observe.plans import ADDRESSES, as_indices, cut_alike, plan_of_ranges, regions_of
from kvplan.observe.transfers import Spans
from kvplan.planning.side import Side
from kvplan.types import Placement

NO_CUTS = np.empty(0, np.int64)


def shown_tensors(length: int) -> dict[tuple[int, ...], int]:
    """Return the number of tensors for indices that name tensors in a list of this length.

    The helper names two or three rows of each possible number of tensors.
    """
    known: dict[tuple[int, ...], int] = {}
    for count in [count for count in range(2, length + 1) if length % count == 0]:
        tensors = np.arange(length).reshape(count, -1).tolist()
        for num_rows in (2, 3):
            for rows in product(range(length // count), repeat=num_rows):
                known[tuple(tensor[row] for tensor in tensors for row in rows)] = count
    return known


@pytest.mark.parametrize("length", [4, 6, 8])
def test_indices_give_the_largest_possible_number_of_tensors(length: int) -> None:
    """The number is 0 if one of the tensors differs, or if the rows adjoin."""
    addresses = 4096 + 64 * np.arange(length)
    ranges = np.stack([addresses, np.full(length, 64)], axis=1)
    regions = regions_of(ranges, "local", NO_CUTS, 0)
    assert [side.num_tensors for side in regions.sides] == [1]
    known = shown_tensors(length)
    tried = {*known, *product(range(length), repeat=2)}
    for indices, at in product(known, range(length)):
        tried.add((*indices[:at], (indices[at % len(indices)] + at) % length, *indices[at + 1 :]))
    for indices in tried:
        in_a_row = indices == tuple(range(indices[0], indices[0] + len(indices)))
        expected = 1 if in_a_row else known.get(indices, 1)
        assert regions.num_layers(np.array(indices)) == expected, indices


@pytest.mark.parametrize(
    ("here", "there", "is_cut"),
    [
        ((0, 1, 4, 5), (3, 1, 9, 7), True),
        ((1, 3, 5, 7), (0, 5, 6, 11), True),
        ((0, 4), (3, 9), False),  # a coincidence is too likely
        ((0, 1, 4, 5), (3, 1, 9, 8), False),
        ((0, 1, 4, 6), (3, 1, 9, 7), False),
        ((0, 1, 4, 5), (1, 2, 3, 4), False),
    ],
)
def test_two_rows_of_two_layers_show_where_both_lists_are_cut(
    here: tuple[int, ...], there: tuple[int, ...], is_cut: bool
) -> None:
    """The list of this process has 4 rows of each layer, and that of the peer has 6."""
    ours, theirs = (
        regions_of(np.array([(4096 + 64 * at, 64) for at in range(2 * rows)]), "", NO_CUTS, 0)
        for rows in (4, 6)
    )
    pair = cut_alike(ours, as_indices(here), theirs, as_indices(there))
    cut = [[(side.num_tensors, side.count) for side in regions.sides] for regions in pair or ()]
    assert cut == ([[(2, 4)], [(2, 6)]] if is_cut else [])


def test_tensors_equal_those_that_the_list_was_made_of() -> None:
    """Rows of a tensor lie at one distance, and touch or have gaps between them."""
    forms = [(3, 64, 64), (4, 128, 64), (3, 64, 64), (3, 192, 64), (3, 192, 64), (5, 96, 96)]
    for made in (forms, forms[::-1], forms[1:2], forms[1:3], forms[3:5] * 3, [(1, 64, 64)]):
        ranges, expected, start = [], [], 1 << 20
        for number, (count, stride, nbytes) in enumerate(made):
            ranges += [(start + row * stride, nbytes) for row in range(count)]
            expected += [(number, row) for row in range(count)]
            start += 10_000 + 1000 * number  # no two distances between tensors are equal
        regions = regions_of(np.array(ranges), "local", NO_CUTS, 7)
        sides = [(s.num_tensors, s.count, s.stride, s.cache_id) for s in regions.sides]
        groups: list[tuple[int, int, int, int]] = []
        for at, (count, stride, _) in enumerate(made):
            if at and made[at - 1][:2] == (count, stride):
                groups[-1] = (groups[-1][0] + 1, *groups[-1][1:])
            else:
                groups.append((1, count, stride, 7 + len(groups)))
        assert sides == groups
        before = np.cumsum([0, *(side.num_tensors for side in regions.sides)])
        tensors = before[regions.group] + regions.tensor
        assert list(zip(tensors.tolist(), regions.row.tolist(), strict=True)) == expected


@pytest.mark.parametrize("pulls", [False, True])
def test_ranges_are_offsets_into_their_registration(pulls: bool) -> None:
    """Ranges of this process are offsets into the registration that contains them.

    They lie in the first registration or another, from the begin to the last byte. Those of the
    peer are addresses.
    """
    bases = np.array([1000, 5000, 9000])
    names = {"a": 1000, "b": 5000, "c": 9000, ADDRESSES.name: 0}
    sides = [Side(1, 1, 4000, False, Placement.HOST, name=name) for name in "abc"]
    here, there = [9010, 1000, 4990, 5000, 3], [70, 80, 90, 60, 50]
    nbytes = [7, 1, 10, 4000, 0]  # a range of no bytes may be anywhere
    plan = plan_of_ranges(pulls, bases, sides, *map(np.array, (here, there, nbytes)))
    found = []
    for part in plan.parts:
        assert (part.src if pulls else part.dst) is ADDRESSES
        mine = part.dst if pulls else part.src
        for src, dst, size in part.segments.expanded():
            ours, theirs = (dst, src) if pulls else (src, dst)
            found.append((mine.name, names[mine.name] + ours, theirs, size))
    assert sorted(found) == [
        ("a", 1000, 80, 1),
        ("a", 4990, 90, 10),
        (ADDRESSES.name, 3, 50, 0),
        ("b", 5000, 60, 4000),
        ("c", 9010, 70, 7),
    ]


def test_a_common_address_is_in_both_ranges() -> None:
    """The result is None only if the ranges share no address, in all pairs of short ranges."""
    ranges = [(start, start + size) for start in range(6) for size in (1, 3)]
    sides = [pair for pair in product(ranges, repeat=2) if pair[0] <= pair[1]]
    for ours, theirs in product(sides, repeat=2):
        one, other = (
            Spans.of(np.array([a for a, _ in side]), np.array([b - a for a, b in side]))
            for side in (ours, theirs)
        )
        held, there = (
            {address for side in sides for address in range(*side)} for sides in (ours, theirs)
        )
        found = one.common(other)
        assert found in held & there if held & there else found is None, (ours, theirs)
