"""A cache compared with what it should hold, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.debug.cells import Cells, Coordinates
from kvplan.debug.difference import Difference, Located
from kvplan.debug.search import Search
from kvplan.debug.tensors import CHUNK, Bytes, Same, comparison, tensors_of
from kvplan.planning import reference
from kvplan.planning.part import Part
from kvplan.planning.plan import PlacedPart, Plan
from kvplan.planning.texts import spans_of
from kvplan.recording import Recording
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
    """Return where a cache differs from what it should hold, in the bytes that `plan` wrote.

    Args:
        expected, found: the tensors of the destination, as they should be and as they are: NumPy
            arrays, or CPU tensors that have `__dlpack__`, one for each tensor at dst and
            contiguous. Of several parts those of each, one part after another.
        plan: what was executed.
        source: the tensors of the source, if there are any to look at: it is said then whether the
            plan was carried out, and bytes of other requests are recognized.
        atol: cells differ if any of their elements differ by more; 0: if any bit does. For caches
            of DT_FLOAT16, DT_BF16, DT_FLOAT or DT_DOUBLE, which two runs need not compute alike.
        recordings: of the engine whose cache it is, and then of its peers: they say who wrote the
            first wrong block.
        cache_id: of that cache; needed with `recordings`; a plan of several parts can have none.

    Raises:
        ValueError: a number outside its C type.
        TypeError: what is neither an array nor a tensor.
        LLMException: LLM_PARAM_INVALID: tensors that do not fit the plan, or that no CPU reaches;
            `atol` below 0, or above for elements that are not of those types; recordings without
            `cache_id`, or with a plan of several parts.
    """
    if isinstance(atol, bool) or not isinstance(atol, int | float):
        raise TypeError(f"atol={shown(atol)} must be a number")
    if not 0 <= atol < math.inf:
        raise invalid(f"atol={atol} must be >= 0 and finite")
    placed = _placed(plan)
    parts = [it.part for it in placed]
    if recordings and (cache_id is None or len(parts) > 1):
        raise invalid("recordings need cache_id, and a plan of one part")
    should, does = (
        tensors_of(name, given, parts, "dst")
        for name, given in (("expected", expected), ("found", found))
    )
    read = None if source is None else tensors_of("source", source, parts, "src")
    found_in = [
        _compare(
            it.part,
            should[it.dst_tensor :],
            does[it.dst_tensor :],
            None if read is None else read[it.src_tensor :],
            comparison(it.part, atol),
        )
        for it in placed
    ]
    if recordings and (first := found_in[0].first) is not None:
        own, *others = recordings
        cache = check_width("cache_id", cache_id, 0, INT64_MAX)
        writes = own.who_wrote(cache, first.row, others)
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
    """Execute `plan` again, by the reference executor, and compare with what it has left.

    Needs as much memory again as `dst` has.

    Args:
        plan: what was executed.
        src: the tensors of the source, as they were then.
        dst: the tensors of the destination, as they were afterwards. They are not written.
        recordings, cache_id: as for `locate`.

    Raises:
        TypeError, ValueError, LLMException: as `locate` does.
    """
    parts = [it.part for it in _placed(plan)]
    read, found = tensors_of("src", src, parts, "src"), tensors_of("dst", dst, parts, "dst")
    expected = [it.copy() for it in found]
    reference.execute(plan, read, expected)
    located = locate(expected, found, plan, source=read, recordings=recordings, cache_id=cache_id)
    return replace(located, is_replay=True)


def _placed(plan: object) -> list[PlacedPart]:
    return [*check_type("plan", plan, Plan).placed()]


def _compare(
    part: Part, expected: list[Bytes], found: list[Bytes], source: list[Bytes] | None, same: Same
) -> Difference:
    """Compare the tensors of one part; the lists begin with its own."""
    dst = Coordinates(part, "dst")
    runs = part.segments.expanded()
    places = [part.pair(index)[1] for index in range(part.num_tensor_pairs)]
    numbers = (runs.src_offsets, runs.dst_offsets, runs.nbytes)
    unit = math.gcd(
        dst.cell_nbytes, *(int(np.gcd.reduce(it)) for it in numbers), *(it for _, it in places)
    )
    starts = (runs.dst_offsets // np.uint64(unit)).astype(np.int64)
    ends = starts + (runs.nbytes // np.uint64(unit)).astype(np.int64)
    wrong_nbytes = elsewhere = 0
    seen: list[set[int]] = [set() for _ in range(5)]  # layers, kv, heads, rows, tokens
    best: tuple[tuple[int, ...], int, Cells] | None = None
    for tensor in range(part.dst.num_tensors):
        differs = _differing(expected[tensor], found[tensor], unit, same)
        if not differs.any():
            continue
        written = np.zeros(len(differs) + 1, np.int8)  # no byte is written twice
        for _, start in (it for it in places if it[0] == tensor):
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
        key = tuple(int(it[at]) for it in (cells.layer, cells.order, cells.part, cells.head))
        if best is None or key < best[0]:
            of_row = (cells.row == cells.row[at]) & (cells.layer == cells.layer[at])
            best = key, tensor, cells.take(of_row & (cells.part == cells.part[at]))
    if best is None:
        return Difference(part, 0, elsewhere)
    layers, kv, heads, rows, orders = (sorted(it) for it in seen)
    _, tensor, cells = best
    search = Search(part, dst, unit, expected, found, source, same, tensor, cells)
    return Difference(
        part,
        wrong_nbytes,
        elsewhere,
        tuple(map(dst.model_layer, layers)),
        "+".join("KV"[it] for it in kv) if dst.has_kv else "",
        tuple(it + dst.first_head for it in heads) if dst.has_heads else (),
        tuple(spans_of(orders)) if dst.knows_tokens else (),
        tuple(rows),
        search.describe(runs, places),
    )


def _differing(expected: Bytes, found: Bytes, unit: int, same: Same) -> NDArray[np.bool_]:
    """Which units of a tensor differ."""
    differs = np.zeros(len(found) // unit, np.bool_)
    step = max(CHUNK // unit, 1)
    for begin in range(0, len(differs), step):
        bytes_of = slice(begin * unit, (begin + step) * unit)
        a, b = expected[bytes_of], found[bytes_of]
        if not np.array_equal(a, b):
            differs[begin : begin + step] = ~same(a.reshape(-1, unit), b.reshape(-1, unit))
    return differs
