"""The number of Python calls and files between a pull and the native call."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

import kvplan
from kvplan import (
    BlockLease,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    Coalesce,
    DataType,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    Rows,
    Transfer,
)
from tests.datadist.peer import Peer

LIMITS = {
    "pull_blocks": (6, 4),
    "push_blocks": (6, 4),
    "pull_cache": (7, 4),
    "push_cache": (7, 4),
    "operation": (29, 10),  # too many bytes for an inline copy
    "planned": (71, 19),  # the order of its segments needs a plan
    "submit": (36, 12),
    "layered": (50, 13),  # four layers
    "groups": (50, 13),  # two caches
}
"""Calls and files of each operation, in the calling thread."""

PACKAGE = Path(kvplan.__file__).parent
DESC = CacheDesc(4, (8, 1024), DataType.DT_FLOAT)
LARGE = CacheDesc(2, (100_000, 16), DataType.DT_INT8)
THEIR_BLOCKS, OWN_BLOCKS = [1, 2, 5], [0, 3, 4]
ALL_BLOCKS = [*range(8)]  # more than an inline copy moves


class Call(NamedTuple):
    """A call of a function of kvplan: its depth below the first one, its file and its name."""

    depth: int
    file: str
    function: str


def calls_of(action: Callable[[], object]) -> list[Call]:
    """Return the calls of Python functions of kvplan that `action` makes, in this thread."""
    seen: list[Call] = []
    folder = str(PACKAGE) + os.sep

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            depth, outer = 0, frame.f_back
            while outer is not None and outer.f_code.co_filename.startswith(folder):
                depth, outer = depth + 1, outer.f_back
            seen.append(Call(depth, code.co_filename.removeprefix(folder), code.co_qualname))

    before = sys.getprofile()
    gc.disable()  # a collection would call finalizers of other tests' objects
    sys.setprofile(record)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return seen


@pytest.fixture(scope="module")
def operations() -> Iterator[dict[str, Callable[[], object]]]:
    """Transfers of a user with a peer in another process, over transport local."""
    peer = Peer()
    try:
        blocks, slots, large, second, blob = peer.run(
            """
            desc = CacheDesc(4, (8, 1024), DataType.DT_FLOAT)
            made = datadist.allocate_blocks_cache(desc), datadist.allocate_cache(desc)
            large = CacheDesc(2, (100_000, 16), DataType.DT_INT8)
            made += datadist.allocate_blocks_cache(large), datadist.allocate_blocks_cache(desc)
            lease = datadist.lease_blocks(made[0], [1, 2, 5])
            result = [*(it.cache_id for it in made), lease.to_bytes()]
            """
        )
        with LlmDataDist(2, LlmRole.DECODER) as user:
            user.initialize()
            user.link_clusters([ClusterInfo(1, peer.address)], timeout_ms=5000).raise_for_status()
            assert user.links()[0].transport == "local"
            user_second = user.allocate_blocks_cache(DESC)
            paged, contiguous = user.allocate_blocks_cache(DESC), user.allocate_cache(DESC)
            lease = BlockLease.from_bytes(blob)
            theirs, slot = CacheIndex(1, blocks), CacheIndex(1, slots, 2)
            many, large_remote = user.allocate_blocks_cache(LARGE), CacheIndex(1, large)
            pull = Transfer(Rows(theirs, THEIR_BLOCKS), Rows(paged, OWN_BLOCKS))
            push = Transfer(
                Rows(paged, OWN_BLOCKS),
                Rows(theirs, THEIR_BLOCKS),
                layers=KvCacheExtParam(None, None, 1),
            )
            other = Transfer(
                Rows(CacheIndex(1, second), THEIR_BLOCKS), Rows(user_second, OWN_BLOCKS)
            )

            def move_layers() -> None:
                task = user.layered(push)
                for layer in range(DESC.num_tensors):
                    task.ready(layer)
                task.wait()

            yield {
                "submit": lambda: user.submit(pull).wait(),
                "layered": move_layers,
                "groups": lambda: user.run({"one": pull, "two": other}),
                "pull_blocks": lambda: user.pull_blocks(theirs, paged, THEIR_BLOCKS, OWN_BLOCKS),
                "run": lambda: user.run(
                    Transfer(Rows(theirs, ALL_BLOCKS), Rows(paged, ALL_BLOCKS))
                ),
                "lease": lambda: user.pull_blocks(lease, paged, None, OWN_BLOCKS, tag="request"),
                "push_blocks": lambda: user.push_blocks(paged, theirs, OWN_BLOCKS, THEIR_BLOCKS),
                "operation": lambda: user.pull_blocks(theirs, paged, ALL_BLOCKS, ALL_BLOCKS),
                "planned": lambda: user.pull_blocks(
                    theirs, paged, THEIR_BLOCKS, OWN_BLOCKS, coalesce=Coalesce.CALLER_ORDER
                ),
                "many": lambda: user.pull_blocks(
                    large_remote, many, [*range(64)], [*range(99_999, 99_935, -1)]
                ),
                "pull_cache": lambda: user.pull_cache(slot, contiguous, 1),
                "push_cache": lambda: user.push_cache(contiguous, slot, 1),
            }
    finally:
        peer.close()


@pytest.mark.parametrize("name", LIMITS)
def test_the_main_path_is_short(operations: dict[str, Callable[[], object]], name: str) -> None:
    """A reader follows the path from the public call to the native one; each call is one jump."""
    operation = operations[name]
    operation()
    seen = calls_of(operation)
    max_calls, max_files = LIMITS[name]
    files = sorted({item.file for item in seen})
    listed = "\n".join(
        [
            f"{name}: {len(seen)} calls (at most {max_calls}), {len(files)} files (at most "
            f"{max_files})",
            *(f"  {'  ' * item.depth}{item.function}  {item.file}" for item in seen),
            *files,
        ]
    )
    verbs = {"operation": "pull_blocks", "planned": "pull_blocks", "groups": "run"}
    assert any(item.function.endswith(f".{verbs.get(name, name)}") for item in seen[:2]), listed
    assert len(seen) <= max_calls, listed
    assert len(files) <= max_files, listed


def test_small_transfers_move_inline(operations: dict[str, Callable[[], object]]) -> None:
    """A transfer that moves inline makes no `Operation`."""
    for name in ("pull_blocks", "lease", "push_blocks", "pull_cache", "push_cache", "many"):
        operations[name]()  # the link remembers the pair from this call on
        functions = [item.function for item in calls_of(operations[name])]
        assert "move_now" in functions
        assert "Operation.__init__" not in functions


def test_a_name_of_the_interface_is_one_call_above_the_verb(
    operations: dict[str, Callable[[], object]],
) -> None:
    """The name only builds a transfer and runs it, so all transfers run in the same way."""
    by_name, by_verb = (
        [item.function for item in calls_of(operations[name])] for name in ("operation", "run")
    )
    assert by_name == ["InterfaceOperations.pull_blocks", "InterfaceOperations._move", *by_verb]
    assert by_verb[0] == "TransferOperations.run"
