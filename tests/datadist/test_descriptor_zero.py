"""Programs without a standard input, in which 0 is a descriptor like any other.

A program uses an engine completely, once for each step: the first descriptor of that step is 0.
Everything must work, and 0 must be closed in the end.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvplan import BlocksCacheKey, CacheDesc, ClusterInfo, DataType, LlmDataDist, LlmRole
from tests.support import zygote
from tests.support.places import LISTEN

DESC = CacheDesc(2, (8, 64), DataType.DT_INT32)
KEY = BlocksCacheKey(2, 5)
STEPS = (
    *("initialize", "allocate", "register", "link", "pull", "push"),
    *("lease", "read", "record", "again", "unregister", "unlink"),
)
NONE, HELD = "nothing", "/dev/null"


@pytest.fixture(params=["local", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def owner(transport: str) -> Iterator[LlmDataDist]:
    with LlmDataDist(2, LlmRole.MIX) as owner:
        owner.initialize({"ListenIpInfo": LISTEN, "kvplan.transport": transport})
        cache = owner.allocate_blocks_cache(DESC, KEY)
        for array in owner.arrays(cache):
            array[:] = 9
        yield owner


def test_zero_is_a_descriptor(owner: LlmDataDist, transport: str, tmp_path: Path) -> None:
    program, address = "tests.datadist.test_descriptor_zero", owner.listen_address
    assert address is not None
    done = zygote.run(program, address, transport, str(tmp_path), environment=os.environ)
    assert not done.stderr, done.stderr
    assert done.stdout.splitlines() == ["", *STEPS]


def main(address: str, transport: str, folder: str) -> None:
    for taken in ("", *STEPS):  # first without a step: some descriptors belong to the process
        with Zero(taken) as zero:
            use(address, transport, Path(folder, f"{taken}.kvrec"), zero)
        print(taken)  # noqa: T201
    sys.stdout.flush()


class Zero:
    """Descriptor 0, which is kept taken except when one step begins."""

    def __init__(self, taken: str) -> None:
        self._taken = taken

    @staticmethod
    def of() -> str:
        path = Path("/proc/self/fd/0")
        return str(path.readlink()) if path.is_symlink() else NONE

    def __enter__(self) -> Zero:
        os.close(0)
        assert os.open(HELD, os.O_RDWR) == 0
        return self

    def begin(self, step: str) -> None:
        """Take 0 again if it is free, and free it if this is the chosen step."""
        if self.of() == NONE:
            assert os.open(HELD, os.O_RDWR) == 0
        if step == self._taken:
            os.close(0)

    def __exit__(self, *error: object) -> None:
        gc.collect()
        assert self.of() in (NONE, HELD), f"{self._taken} has left {self.of()}"
        if self.of() == NONE:
            os.open(HELD, os.O_RDWR)


def use(address: str, transport: str, path: Path, zero: Zero) -> None:
    """Use an engine of cluster 1 completely, with an engine of cluster 2."""
    engine, mine = LlmDataDist(1, LlmRole.MIX), np.zeros((2, *DESC.shape), np.int32)
    zero.begin("initialize")
    engine.initialize({"ListenIpInfo": LISTEN, "kvplan.transport": transport})
    with engine:
        zero.begin("allocate")
        engine.allocate_blocks_cache(DESC, BlocksCacheKey(1, 5))
        zero.begin("register")
        cache = engine.register_blocks_cache(DESC, [array.ctypes.data for array in mine])
        zero.begin("link")
        engine.link_clusters([ClusterInfo(2, address)]).raise_for_status()
        zero.begin("pull")
        engine.pull_blocks(KEY, cache, [1, 2], [3, 4])
        assert (mine[:, 3:5] == 9).all()
        zero.begin("push")
        engine.push_blocks(cache, KEY, [3], [7])
        zero.begin("lease")
        engine.release(engine.lease_blocks(cache, [1]))
        zero.begin("read")
        assert len(engine.caches(2)) == 1
        for step in ("record", "again"):
            zero.begin(step)
            with engine.record(path):
                engine.pull_blocks(KEY, cache, [1], [5])
        zero.begin("unregister")
        engine.unregister_cache(cache.cache_id)
        zero.begin("unlink")
        engine.unlink_clusters([2]).raise_for_status()
