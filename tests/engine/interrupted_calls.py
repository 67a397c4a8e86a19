"""A program that interrupts a call of an engine at each place, and prints the leftovers, as JSON.

Args: the call; the number of places from one interrupt to the next.
"""

import gc
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvplan import Cache, CacheDesc, DataType, LlmDataDist, LlmRole
from kvplan.engine.cache_api import CacheStatus
from kvplan.status import LLMException
from tests.support.held import Held
from tests.support.interrupts import Interrupts

DESC = CacheDesc(2, (4, 64), DataType.DT_INT8)
INSIDE = "/kvplan/"
DEADLINE_S = 30


def main(call: str, distance: str) -> None:
    step = int(distance)
    engine = LlmDataDist(1, LlmRole.MIX)
    engine.initialize({"ListenIpInfo": "127.0.0.1:0"})
    blocks = engine.allocate_blocks_cache(DESC)
    arrays = [np.zeros((4, 64), np.int8) for _ in range(2)]
    file = Path(tempfile.mkdtemp(), "recording")
    cluster_ids = iter(range(2, 10_000))

    def allocate() -> None:
        engine.deallocate_cache(engine.allocate_cache(DESC))

    def register() -> None:
        engine.unregister_cache(engine.register_cache(DESC, arrays).cache_id)

    def record() -> None:
        with engine.record(file):
            pass

    def lease() -> None:
        engine.release(engine.lease_blocks(blocks, [1, 2], ttl_ms=1e6))

    def initialize() -> None:
        another = LlmDataDist(next(cluster_ids), LlmRole.MIX)
        another.initialize({"ListenIpInfo": "127.0.0.1:0"})
        another.finalize()

    def end_listed() -> None:
        """End all objects that an engine lists, as a program can after an interrupted call."""
        for cache in engine.caches():
            if cache.cache_id != blocks.cache_id:
                end(cache)
        for lease in engine.leases():
            engine.release(lease)
        with suppress(LLMException):
            if (recorder := engine._running().recorder) is not None:
                recorder.close()

    def end(listed: CacheStatus) -> None:
        if listed.allocated:
            engine.deallocate_cache(Cache(listed.cache_desc, listed.cache_id, ()))
        else:
            engine.unregister_cache(listed.cache_id)

    function = {value.__name__: value for value in (allocate, register, record, lease, initialize)}[
        call
    ]
    # first without interrupts: the call loads modules, and starts threads of the process
    function()
    before, errors = Held.now(), Counter[str]()
    registered = registrations(engine)
    interrupts = Interrupts(INSIDE, step)
    while interrupts.call(function):
        end_listed()
        try:
            function()
        except Exception as error:
            errors[repr(error)] += 1
    left = {
        "next_call": errors,
        "registrations": registrations(engine) - registered,
        "caches": len(engine.caches()) - 1,
        "leases": len(engine.leases()),
    }
    deadline = time.monotonic() + DEADLINE_S
    while (new := before.new()).descriptors or new.threads:
        gc.collect()  # an engine that its caller did not receive ends in a thread
        assert time.monotonic() < deadline, new
    engine.finalize()
    sys.stdout.write(json.dumps(left | {"interrupts": interrupts.place // step - 1}) + "\n")


def registrations(engine: LlmDataDist) -> int:
    """Count all registrations, by the metadata of a transport that lists them."""
    assert engine._engine is not None
    local = next(
        transport for transport in engine._engine.registry._transports if transport.name == "local"
    )
    return int(repr(local).split()[-2])


if __name__ == "__main__":
    main(*sys.argv[1:])
