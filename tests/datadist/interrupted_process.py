"""A program that transfers under a storm of KeyboardInterrupts, and prints what is left, as JSON.

Args: the machine; the operation: a pull by "index" or "prefix", a push by "layers", or a "gather";
    the number of interrupts.
"""

import json
import random
import signal
import sys
import time
from collections.abc import Callable

from kvplan import (
    CacheDesc,
    CacheIndex,
    CacheKey,
    ClusterInfo,
    DataType,
    LlmRole,
    Options,
    Rows,
    Shard,
    Transfer,
)
from tests.datadist.machine import machine_of

DESC = CacheDesc(4, (4, 4096), DataType.DT_INT8, shard=Shard(num_layers=2))
PAGED = CacheDesc(2, (4, 16, 2, 64), DataType.DT_INT8, kv_tensor_format="NHD")
DEADLINE_S = 30


def wait_until_true(holds: Callable[[], bool]) -> None:
    """Return once `holds()` is true. If it never is, the parent's timeout ends this process."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds() and time.monotonic() < deadline:
        pass


def main(machine: str, kind: str, wanted: int) -> None:
    owner, user = (machine_of(machine, number).engine(number, LlmRole.MIX) for number in (1, 2))
    owner.initialize({"ListenIpInfo": "127.0.0.1:0"})
    user.initialize(Options(sync_kv_cache_wait_time=5000))
    assert owner.listen_address is not None
    user.link_clusters([ClusterInfo(1, owner.listen_address)], 5000).raise_for_status()
    key = CacheKey(1, prefix_id=9)
    source, target = owner.allocate_cache(DESC, [key]), user.allocate_cache(DESC)
    src = key if kind == "prefix" else CacheIndex(1, source.cache_id)

    def push() -> None:
        task = user.layered(Transfer(Rows(target), Rows(CacheIndex(1, source.cache_id))))
        for layer in task.layers:
            task.ready(layer)
        task.wait(5000)

    def pull() -> None:
        user.pull_cache(src, target, timeout_ms=5000)

    def gather() -> None:
        user.run(Transfer([Rows(here, [3, 0])], Rows(paged, [1, 2])), timeout_ms=5000)

    offered = [source]
    if kind == "gather":
        offered.append(owner.allocate_blocks_cache(PAGED))
        here, paged = CacheIndex(1, offered[1].cache_id), user.allocate_blocks_cache(PAGED)
    call = {"layers": push, "gather": gather}.get(kind, pull)
    chance = random.Random(1)
    interrupts = 0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    while interrupts < wanted:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 2e-3))
            for _ in range(200):  # an interrupt of a weak reference's callback is never seen
                call()
            signal.setitimer(signal.ITIMER_REAL, 0)  # if the call was fast, the timer has not fired
        except KeyboardInterrupt:
            interrupts += 1
        except RuntimeError as error:  # what an interrupt makes of a `threading.Condition`
            if not isinstance(error.__context__, KeyboardInterrupt):
                raise
            interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    wait_until_true(lambda: not user.metrics()["in_flight"])
    in_flight = user.metrics()["in_flight"], user.links()[0].in_flight
    # The owner frees a deallocated cache when the last claim ends.
    owner.remove_cache_key(key)
    for cache in offered:
        owner.deallocate_cache(cache)
    wait_until_true(lambda: not owner.caches())
    (unlinked,) = user.unlink_clusters([1], 5000)
    began = time.monotonic()
    user.finalize()
    left = {
        "in_flight": in_flight,
        "caches": len(owner.caches()),
        "unlinked": unlinked.status.name,
        "finalized_at_once": time.monotonic() - began < 4,
    }
    owner.finalize()
    sys.stdout.write(json.dumps(left) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
