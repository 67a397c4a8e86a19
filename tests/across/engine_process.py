"""The process of an `Engine`: `holder` holds an engine and a cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kvplan
from kvplan import Cache, CacheDesc, CacheIndex, LlmDataDist, LLMException, LlmRole, Options
from tests.faults.contents import Tensor, make_cache, pattern
from tests.faults.states import link_of, wait_for_state

LONG_MS = 30_000


class Holder:
    """An engine and its cache. Transfers use slot 0, and must never write to slot 1."""

    datadist: LlmDataDist
    cache: Cache
    arrays: list[Tensor]

    def begin(self, cluster_id: int, options: dict[str, Any]) -> str | None:
        """Start an engine; return its address."""
        self.datadist = LlmDataDist(cluster_id, LlmRole.MIX)
        self.datadist.initialize(Options(**options))
        return self.datadist.listen_address

    def hold(self, memory: str, seed: int | None, num_tensors: int, shape: tuple[int, ...]) -> int:
        """Make a cache in "allocated" or "registered" memory; return its id."""
        desc = CacheDesc(num_tensors, tuple(shape), kvplan.DataType.DT_INT32)
        self.cache, self.arrays = make_cache(self.datadist, memory, seed, desc)
        return self.cache.cache_id

    def move(self, direction: str, peer: int, cache_id: int, timeout_ms: int) -> dict[str, Any]:
        """Pull slot 0 from a peer's cache, or push it there; return the result."""
        there = CacheIndex(peer, cache_id)
        if direction == "pull":
            return outcome(
                lambda: self.datadist.pull_cache(there, self.cache, timeout_ms=timeout_ms)
            )
        return outcome(lambda: self.datadist.push_cache(self.cache, there, timeout_ms=timeout_ms))

    def wrong(self, seed: int, unconfirmed: list[tuple[int, int]]) -> list[str]:
        """Return the errors in the cache. Descriptor i is slot 0 of tensor i."""
        missing = {number for first, last in unconfirmed for number in range(first, last)}
        expected = pattern(seed, self.cache.cache_desc)
        found = []
        for number, (array, right) in enumerate(zip(self.arrays, expected, strict=True)):
            if number not in missing and (array[0] != right[0]).any():
                found.append(f"slot 0 of tensor {number} is confirmed, and wrong")
            if array[1:].any() and (array[1:] != right[1:]).any():
                found.append(f"slot 1 of tensor {number} was touched")
        return found

    def fill(self, seed: int) -> None:
        """Fill the whole cache with the pattern of a seed."""
        for array, values in zip(self.arrays, pattern(seed, self.cache.cache_desc), strict=True):
            array[:] = values

    def clear(self) -> None:
        """Zero the whole cache."""
        for array in self.arrays:
            array[:] = 0

    def end(self) -> None:
        """Finalize the engine, and release everything."""
        self.datadist.finalize()
        self.__dict__.clear()


def outcome(call: Callable[[], object]) -> dict[str, Any]:
    """Call a function; return status, message, unconfirmed descriptors and duration."""
    began, status, text, unconfirmed = time.monotonic(), "LLM_SUCCESS", "", []
    try:
        call()
    except LLMException as error:
        status, text = error.status_code.name, str(error)
        unconfirmed = list(error.unconfirmed)
    seconds = time.monotonic() - began
    return {"status": status, "text": text, "unconfirmed": unconfirmed, "seconds": seconds}


def names() -> dict[str, Any]:
    logging.getLogger("kvplan").setLevel(logging.CRITICAL)
    return {item: getattr(kvplan, item) for item in kvplan.__all__} | {
        "holder": Holder(),
        "np": np,
        "outcome": outcome,
        "link_of": link_of,
        "make_cache": make_cache,
        "pattern": pattern,
        "wait_for_state": wait_for_state,
    }
