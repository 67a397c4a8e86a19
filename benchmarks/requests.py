"""Requests of several caches: groups, gathers and layers, beside copies of the same runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.engine_peer import HALVES, half_key
from benchmarks.engines import linked_engine
from benchmarks.table import Row, Run, Topic, timed
from kvnative._executor import Executor, ThreadPool, host_backend
from kvplan import CacheDesc, DataType, LlmDataDist, Rows, Shard, Transfer
from kvplan.execution.binding import bind
from kvplan.execution.memory import HostMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.planning.transfer import AnyTransfer

TOPIC = Topic()
WHOLE = CacheDesc(
    32, (128, 16, 2, 64), DataType.DT_FLOAT16, kv_tensor_format="NHD", shard=Shard(num_layers=16)
)
BLOCKS = 64
ROUNDS = 201


def tables() -> tuple[list[int], list[int]]:
    """Blocks of a request there and here."""
    rng = np.random.default_rng(6)
    there, here = (rng.permutation(WHOLE.batch_size)[:BLOCKS].tolist() for _ in range(2))
    return there, here


def beside_copies(
    run: Run, name: str, datadist: LlmDataDist, transfer: AnyTransfer, move: Callable[[], object]
) -> Row:
    """What `move` takes longer than copies of the same runs inside this process."""
    plan = datadist.plan(transfer)
    src, dst = (
        HostMemory.from_arrays(
            [
                np.zeros(side.tensor_nbytes, np.uint8)
                for side in (getattr(part, field) for part in plan.parts)
                for _ in range(side.num_tensors)
            ]
        )
        for field in ("src", "dst")
    )
    descriptors = bind(plan, src, dst, one_space=True)
    with Executor(host_backend(ThreadPool())) as executor:
        ours, bare = run.medians(
            timed(move), timed(lambda: executor.run(descriptors)), rounds=ROUNDS
        )
    note = (
        f"{plan.num_descriptors} runs, {plan.nbytes / 1e6:.1f} MB: {1e6 * ours:.0f} us beside "
        f"{1e6 * bare:.0f} us; limit: copies of the same runs"
    )
    return Row(name, 1e6 * (ours - bare), "us more", 1e6 * bare, note=note)


@TOPIC.row("groups_us")
def groups(run: Run, name: str) -> Row:
    """Two caches of one request, from one peer."""
    datadist = linked_engine(run)
    caches = [datadist.allocate_blocks_cache(half) for half in HALVES]
    there, here = tables()
    transfer = {
        f"group {head}": Transfer(Rows(half_key(1, head), there), Rows(cache, here))
        for head, cache in enumerate(caches)
    }
    move = partial(datadist.run, transfer)
    move()
    for head, cache in enumerate(caches):
        assert all(
            (tensor[here] == 2 * number + head).all()
            for number, tensor in enumerate(datadist.arrays(cache))
        )
    row = beside_copies(run, name, datadist, transfer, move)
    for cache in caches:
        datadist.deallocate_cache(cache)
    return row


@TOPIC.row("gather_us")
def gather(run: Run, name: str) -> Row:
    """One cache from two that hold a KV head each."""
    datadist = linked_engine(run)
    cache = datadist.allocate_blocks_cache(WHOLE)
    there, here = tables()
    sources = [Rows(half_key(1, head), there) for head in range(2)]
    transfer = Transfer(sources, Rows(cache, here))
    move = partial(datadist.run, transfer)
    move()
    for number, tensor in enumerate(datadist.arrays(cache)):
        assert all((tensor[here, :, head] == 2 * number + head).all() for head in range(2))
    row = beside_copies(run, name, datadist, transfer, move)
    datadist.deallocate_cache(cache)
    return row


@TOPIC.row("layered_us")
def layered(run: Run, name: str) -> Row:
    """A push of 16 layers, all of which are ready at once."""
    datadist = linked_engine(run)
    cache = datadist.allocate_blocks_cache(HALVES[0])
    for number, tensor in enumerate(datadist.arrays(cache)):
        tensor[:] = 2 * number
    there, here = tables()
    transfer = Transfer(Rows(cache, here), Rows(half_key(1, 0), there))

    def move() -> None:
        task = datadist.layered(transfer)
        for layer in task.layers:
            task.ready(layer)
        task.wait()

    move()
    row = beside_copies(run, name, datadist, transfer, move)
    datadist.deallocate_cache(cache)
    return row
