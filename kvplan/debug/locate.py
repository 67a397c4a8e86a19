"""A cache compared with its expected content, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.debug.cells import CHUNK, Bytes, Cells, Coordinates, Same, comparison, tensors_of
from kvplan.debug.difference import Difference, Located
from kvplan.debug.search import Search
from kvplan.planning import reference
from kvplan.planning.part import Part
from kvplan.planning.plan import PlacedPart, Plan
from kvplan.planning.texts import spans_of
from kvplan.recording import Recording, who_wrote
from kvplan.status import invalid
from kvplan.validation import INT64_MAX, check_type, check_width, shown


def locate(
    expected: Sequence[Any],
    found: Sequence[Any],
    plan: Plan,
    *,
    source: Sequence[Any] | None = None,
    atol: float = 0.0,
    recordings: Sequence[Recording] = (),
    cache_id: int | None = None,
) -> Located:
    """Find the differences between a cache and its expected content, after `plan` was executed.

    Args:
        expected, found: the expected and the actual tensors of the destination: NumPy arrays, or
            contiguous CPU tensors of any library, one for each tensor at dst. The tensors of
            several parts follow each other.
        plan: the executed plan.
        source: the tensors of the source, if available. The result then tells whether the bytes
            were copied as planned, and recognizes bytes of other requests.
        atol: cells differ if an element differs by more than this; 0: if any bit differs. Above 0
            only for DT_FLOAT16, DT_BF16, DT_FLOAT and DT_DOUBLE, whose values may differ between
            two runs.
        recordings: the recording of the engine that owns the cache, then those of its peers. They
            name the transfers that wrote the first wrong block.
        cache_id: id of the cache; required with `recordings`, which need a plan of one part.

    Raises:
        ValueError: a number outside its C type.
        TypeError: an argument of another type.
        LLMException: LLM_PARAM_INVALID: tensors that do not fit the plan, or that no CPU reaches;
            `atol` below 0, or above 0 for other data types; recordings without `cache_id`, or with
            a plan of several parts.
    """
    if isinstance(atol, bool) or not isinstance(atol, int | float):
        raise TypeError(f"atol={shown(atol)} must be a number")
    if not 0 <= atol < math.inf:
        raise invalid(f"atol={atol} must be >= 0 and finite")
    placed = _placed(plan)
    parts = [placed_part.part for placed_part in placed]
    if recordings and (cache_id is None or len(parts) > 1):
        raise invalid("recordings need cache_id, and a plan of one part")
    should, does = (
        tensors_of(name, given, parts, "dst")
        for name, given in (("expected", expected), ("found", found))
    )
    read = None if source is None else tensors_of("source", source, parts, "src")
    found_in = [
        _compare(
            placed_part.part,
            should[placed_part.dst_tensor :],
            does[placed_part.dst_tensor :],
            None if read is None else read[placed_part.src_tensor :],
            atol,
        )
        for placed_part in placed
    ]
    if recordings and (first := found_in[0].first) is not None:
        own, *others = recordings
        cache = check_width("cache_id", cache_id, 0, INT64_MAX)
        writes = who_wrote(own, cache, first.row, others)
        found_in = [replace(found_in[0], first=replace(first, writes=tuple(writes)))]
    return Located(tuple(found_in))


def replay(
    plan: Plan,
    src: Sequence[Any],
    dst: Sequence[Any],
    *,
    recordings: Sequence[Recording] = (),
    cache_id: int | None = None,
) -> Located:
    """Execute `plan` again with the reference executor, and compare its result with the actual one.

    This needs memory for a second copy of `dst`.

    Args:
        plan: the executed plan.
        src: the tensors of the source at the time of the transfer.
        dst: the tensors of the destination after the transfer; they are not written.
        recordings, cache_id: as for `locate`.

    Raises:
        TypeError, ValueError, LLMException: see `locate`.
    """
    parts = [placed_part.part for placed_part in _placed(plan)]
    read, found = tensors_of("src", src, parts, "src"), tensors_of("dst", dst, parts, "dst")
    expected = [array.copy() for array in found]
    reference.execute(plan, read, expected)
    located = locate(expected, found, plan, source=read, recordings=recordings, cache_id=cache_id)
    return replace(located, is_replay=True)


def _placed(plan: object) -> list[PlacedPart]:
    return [*check_type("plan", plan, Plan).placed()]


def _compare(
    part: Part,
    expected: list[Bytes],
    found: list[Bytes],
    source: list[Bytes] | None,
    atol: float,
) -> Difference:
    """Compare the tensors of one part, which are the first of each list."""
    dst = Coordinates(part, "dst")
    runs = part.segments.expanded()
    places = [part.pair(index)[1] for index in range(part.num_tensor_pairs)]
    numbers = (runs.src_offsets, runs.dst_offsets, runs.nbytes)
    unit = math.gcd(
        dst.cell_nbytes,
        part.dst.tensor_nbytes,
        part.dst.stride,
        *(int(np.gcd.reduce(distances)) for distances in numbers),
        *(start for _, start in places),
    )
    same = comparison(part, unit, atol)
    starts = (runs.dst_offsets // np.uint64(unit)).astype(np.int64)
    ends = starts + (runs.nbytes // np.uint64(unit)).astype(np.int64)
    wrong_nbytes = elsewhere = 0
    seen: list[set[int]] = [set() for _ in range(5)]  # layers, kv, heads, rows, tokens
    best: tuple[tuple[int, ...], int, Cells] | None = None
    for tensor in range(part.dst.num_tensors):
        differs = _differing(expected[tensor], found[tensor], unit, same)
        if not differs.any():
            continue
        written = np.zeros(len(differs) + 1, np.int8)  # int8 suffices: no byte is written twice
        for _, start in (place for place in places if place[0] == tensor):
            np.add.at(written, starts + start // unit, 1)
            np.add.at(written, ends + start // unit, -1)
        is_written = np.cumsum(written[:-1], dtype=np.int8) > 0
        elsewhere += int(np.count_nonzero(differs & ~is_written)) * unit
        offsets = np.flatnonzero(differs & is_written) * unit
        if not len(offsets):
            continue
        wrong_nbytes += len(offsets) * unit
        cells = dst.cells(tensor, offsets)
        for column, values in zip(
            (cells.layer, cells.part, cells.head, cells.row, cells.order), seen, strict=True
        ):
            values.update(np.unique(column).tolist())
        at = int(np.lexsort((cells.head, cells.part, cells.order, cells.layer))[0])
        key = tuple(
            int(column[at]) for column in (cells.layer, cells.order, cells.part, cells.head)
        )
        if best is None or key < best[0]:
            of_row = (cells.row == cells.row[at]) & (cells.layer == cells.layer[at])
            best = key, tensor, cells.take(of_row & (cells.part == cells.part[at]))
    if best is None:
        return Difference(part, 0, elsewhere)
    layers, kv, heads, rows, orders = (sorted(numbers) for numbers in seen)
    _, tensor, cells = best
    search = Search(part, dst, unit, expected, found, source, same, tensor, cells)
    return Difference(
        part,
        wrong_nbytes,
        elsewhere,
        tuple(map(dst.model_layer, layers)),
        "+".join("KV"[number] for number in kv) if dst.has_kv else "",
        tuple(head + dst.first_head for head in heads) if dst.has_heads else (),
        tuple(spans_of(orders)) if dst.knows_tokens else (),
        tuple(rows),
        search.describe(runs, places),
    )


def _differing(expected: Bytes, found: Bytes, unit: int, same: Same) -> NDArray[np.bool_]:
    """Return a mask of the units of a tensor that differ."""
    differs = np.zeros(len(found) // unit, np.bool_)
    step = max(CHUNK // unit, 1)
    for begin in range(0, len(differs), step):
        bytes_of = slice(begin * unit, (begin + step) * unit)
        a, b = expected[bytes_of], found[bytes_of]
        if not np.array_equal(a, b):
            differs[begin : begin + step] = ~same(a.reshape(-1, unit), b.reshape(-1, unit))
    return differs
