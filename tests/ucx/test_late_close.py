"""A UCX that ends operations and closes endpoints late: waiting threads, and the end of keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from kvnative._backend import KVN_CANCELLED, KVN_PEER_GONE
from tests.support.compiled import compiled
from tests.support.ucx_library import found
from tests.ucx.peer import run, stand_in

PULLING = """
from pathlib import Path
import numpy as np
from kvnative._executor import Executor
from tests.ucx.peer import NBYTES, TIMEOUT_MS, UcxPeer

worker, peer = UcxWorker(UcxLibrary.load(path)), UcxPeer(Path(sys.argv[2]))
library = ctypes.CDLL(path)
if "watched" in sys.argv:
    library.watch_peers()
endpoint = peer.connect(worker)
executor = Executor(peer.backend(endpoint, "get", [(0, NBYTES, peer.take())]))
local = np.zeros(NBYTES, np.uint8)

def submit():
    "A pull that is on its way: what the thread had not begun, a close ends at once."
    task = executor.submit(peer.descriptors("get", local, [(0, 0, NBYTES)]))
    while not library.num_begun():
        os.sched_yield()
    return task

def wait_for_close():
    "Until UCX has closed the endpoint, which a worker's close waits for."
    library.may_close_in(ctypes.c_int64(0))
    worker.close()

def show():
    print(library.keys_destroyed(), library.keys_destroyed_in_use(),
          library.keys_destroyed_after_close())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with found() as ucx:
        yield stand_in(tmp_path_factory.mktemp("late"), "late_close", ucx.path)


@pytest.mark.parametrize("kind", ["watched", "unwatched"])
def test_a_transfer_ends_though_ucx_closes_its_endpoint_late(
    library: str, tmp_path: Path, kind: str
) -> None:
    """The thread of the worker has stopped by then, so `cancel` makes progress itself."""
    script = """
        task = submit()
        worker.close()
        print(task.done)
        library.may_close_in(ctypes.c_int64(2000))
        print(task.cancel().status)
        peer.close()
        """
    printed = run(PULLING + dedent(script), library, str(tmp_path / "memory"), kind)
    assert printed == f"False\n{KVN_CANCELLED}\n"


@pytest.mark.parametrize("kind", ["watched", "unwatched"])
def test_keys_are_destroyed_before_their_endpoint_is_closed(
    library: str, tmp_path: Path, kind: str
) -> None:
    """Two keys belong to the endpoint, and one to a backend that outlives the close."""
    script = """
        endpoint.close()
        wait_for_close()
        show()
        executor.close()
        del executor
        show()
        peer.close()
        """
    printed = run(PULLING + dedent(script), library, str(tmp_path / "memory"), kind)
    assert printed == "3 0 0\n" * 2


def test_a_worker_closes_after_the_keys_of_its_endpoints_are_destroyed(
    library: str, tmp_path: Path
) -> None:
    """The pass in which UCX closes an endpoint is slow, and would be the last of the thread."""
    script = """
        task = submit()
        library.pass_slowly()
        endpoint.close()
        wait_for_close()
        print(library.keys_destroyed(), task.done)
        peer.close()
        """
    printed = run(PULLING + dedent(script), library, str(tmp_path / "memory"), "watched")
    assert printed == "3 True\n"


@pytest.mark.parametrize(("kind", "after_close"), [("watched", 3), ("unwatched", 0)])
def test_keys_are_destroyed_after_the_operations_that_use_them(
    library: str, tmp_path: Path, kind: str, after_close: int
) -> None:
    """A close by force, which ends the operations, is the only exception."""
    script = """
        task = submit()
        endpoint.close()
        show()
        library.may_close_in(ctypes.c_int64(0))
        print(task.wait(TIMEOUT_MS).status)
        wait_for_close()
        show()
        peer.close()
        """
    printed = run(PULLING + dedent(script), library, str(tmp_path / "memory"), kind)
    assert printed == f"0 0 0\n{KVN_PEER_GONE}\n3 0 {after_close}\n"


@pytest.mark.parametrize("name", ["woken_by_the_last", "begun_by_the_holder"])
def test_threads_of_a_worker_interleave(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """The end of the last endpoint wakes a waiting thread; the holder of a lock begins all work."""
    compiled(tmp_path_factory.mktemp("closing"), "tests/ucx/closing_main.c")(name)
