"""Which registered caches lie where other memory was mapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvplan.engine.cache_entry import CacheEntry
from kvplan.engine.cache_memory import merged_ranges
from kvplan.inspection.units import plural
from kvplan.status import invalid
from kvplan.validation import UINT64_MAX, check_width, shown


def checked_ranges(ranges: object) -> list[tuple[int, int]]:
    """The (address, nbytes) of a caller.

    Raises:
        TypeError: no sequence of pairs of int.
        ValueError: a number outside uint64.
        LLMException: LLM_PARAM_INVALID: none at all, address 0, no bytes, or an end past 2**64.
    """
    if isinstance(ranges, str | bytes) or not isinstance(ranges, Sequence):
        raise TypeError(f"ranges={shown(ranges)} must be a sequence of (address, nbytes)")
    if not ranges:
        raise invalid("ranges is empty; at least one is needed")
    checked = []
    for position, it in enumerate(ranges):
        name = f"ranges[{position}]"
        if not isinstance(it, tuple | list) or len(it) != 2:
            raise TypeError(f"{name}={shown(it)} must be (address, nbytes)")
        address = check_width(f"{name} address", it[0], 0, UINT64_MAX)
        nbytes = check_width(f"{name} nbytes", it[1], 0, UINT64_MAX)
        if not address or not nbytes or address + nbytes > 2**64:
            raise invalid(
                f"{name}={it} must be of an address and nbytes of at least 1, and end by 2**64"
            )
        checked.append((address, nbytes))
    return checked


def remapped(entries: Iterable[CacheEntry], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The ids of the registered caches that the ranges touch.

    Raises:
        LLMException: LLM_PARAM_INVALID: a byte of a range is in none.
    """
    registered = [(it, merged_ranges(it.memory)) for it in entries if not it.owned]
    touched: set[int] = set()
    for position, (address, nbytes) in enumerate(ranges):
        covered = address  # every byte from the address to here is in a cache
        pieces = sorted(
            (start, size, entry.cache.cache_id)
            for entry, parts in registered
            for start, size in parts
            if start < address + nbytes and address < start + size
        )
        for start, size, cache_id in pieces:
            touched.add(cache_id)
            if start <= covered:
                covered = max(covered, start + size)
        if covered < address + nbytes:
            raise invalid(
                f"ranges[{position}]=({address:#x}, {nbytes}): the byte at {covered:#x} is in none "
                f"of the {plural(len(registered), 'registered cache')}"
            )
    return sorted(touched)
