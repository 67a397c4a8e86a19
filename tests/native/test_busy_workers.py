"""Threads that copy: their number, the place left to a waiting caller, their search for jobs."""

import os
import shutil
import subprocess
import time
from pathlib import Path
from time import sleep, thread_time_ns

import pytest

from kvnative._backend import KVN_OK, ThreadPool, host_backend
from kvnative._executor import Executor
from tests.native.scatter import Scattered, scatter

ROOT = Path(__file__).parents[2]
SIZES = [1 << 20] * 64
SOME_NS = 1_000_000
"""Minimum time of a thread that has copied; one that wakes in vain takes a hundredth."""


def threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


class Workers:
    """The threads of a pool, and their running times."""

    def __init__(self, count: int) -> None:
        before = threads()
        self.pool = ThreadPool(count)
        self.ids = sorted(threads() - before)
        assert len(self.ids) == count
        self.start()

    def start(self) -> None:
        self._before = self._ran()

    def busy(self) -> int:
        """Return how many threads have copied since `start`."""
        pairs = zip(self._before, self._ran(), strict=True)
        return sum(after - before > SOME_NS for before, after in pairs)

    def _ran(self) -> list[int]:
        stats = [
            Path(f"/proc/self/task/{thread_id}/schedstat").read_text() for thread_id in self.ids
        ]
        return [int(stat.split()[0]) for stat in stats]


@pytest.fixture(scope="module")
def case() -> Scattered:
    return scatter(SIZES)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_workers_leave_one_place_of_a_layer_if_there_are_several(
    case: Scattered, count: int
) -> None:
    workers = Workers(count)
    case.target[:] = 0
    task = Executor(host_backend(workers.pool)).layered(case.descriptors, len(SIZES))
    task.open(0)
    while not task.done:
        sleep(0.001)
    assert 1 <= workers.busy() <= max(1, count - 1)
    assert task.report.status == KVN_OK
    assert case.arrived(0)


def test_a_caller_that_waits_for_a_layer_takes_the_free_place(case: Scattered) -> None:
    workers = Workers(2)
    executor = Executor(host_backend(workers.pool))
    for _ in range(50):  # on a busy machine the worker may finish before this thread runs
        workers.start()
        task = executor.layered(case.descriptors, len(SIZES))
        before = thread_time_ns()
        task.open(0)
        assert task.wait().status == KVN_OK
        assert workers.busy() <= 1
        if thread_time_ns() - before > SOME_NS:
            return
    pytest.fail("only the workers have copied")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_caller_that_waits_at_once_has_a_place_and_wakes_no_worker(
    case: Scattered, count: int
) -> None:
    workers = Workers(count)
    executor = Executor(host_backend(workers.pool))
    for _ in range(20):
        workers.start()
        assert executor.run(case.descriptors).status == KVN_OK
        assert workers.busy() <= max(1, count - 1)


def test_workers_look_for_the_next_transfer_if_each_has_a_core(case: Scattered) -> None:
    cores = len(os.sched_getaffinity(0))
    crowded, fitting = ThreadPool(cores + 1), ThreadPool(1)
    for pool in (crowded, fitting):
        executor = Executor(host_backend(pool))
        for _ in range(5):
            task = executor.submit(case.descriptors)
            while not task.done:  # without waiting, so that a worker moves the bytes
                sleep(0.001)
    assert crowded.looks == 0
    # At most one look each: workers stop looking after four looks in vain.
    assert 1 <= fitting.looks <= 5


@pytest.mark.parametrize("layers", [0, 1], ids=["whole", "behind a layer"])
def test_all_workers_share_a_batch_that_was_submitted_whole(case: Scattered, layers: int) -> None:
    workers = Workers(2)
    executor = Executor(host_backend(workers.pool))
    end = time.monotonic() + 30
    while workers.busy() < 2:  # on a busy machine one may do all the work before the other runs
        assert time.monotonic() < end, "one worker copies alone"
        workers.start()
        first = [executor.layered(case.descriptors, len(SIZES)) for _ in range(layers)]
        for layered in first:
            layered.open(0)
        tasks = [*first, *(executor.submit(case.descriptors) for _ in range(20))]
        while not all(task.done for task in tasks):
            sleep(0.001)


@pytest.fixture(scope="module")
def pool_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile `pool_main.c`, with the sanitizers of this run."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    target = tmp_path_factory.mktemp("pool") / "pool"
    names = (
        *("host/job.c", "host/numa.c", "host/places.c", "host/copy.c"),
        *("core/report.c", "core/thread.c"),
    )
    sources = [ROOT / "tests/native/pool_main.c", *(ROOT / "kvnative/src" / name for name in names)]
    includes = [f"-I{ROOT / name}" for name in ("kvnative/src", "include")]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    if sanitizers := os.environ.get("KVPLAN_SANITIZE"):
        flags += [f"-fsanitize={sanitizers}"]
    command = ["cc", *flags, *includes, *map(str, sources), "-o", str(target)]
    subprocess.run(command, check=True, env=os.environ | {"LD_PRELOAD": ""})
    return target


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_caller_that_sleeps_takes_the_place_that_is_left_for_it(
    pool_program: Path, count: int
) -> None:
    """All places are taken when the caller arrives. Its job then has all threads of the pool."""
    done = subprocess.run([pool_program, str(count)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{count}\n", "")


@pytest.mark.parametrize(
    ("what", "output"),
    [
        ("first", "ba"),  # b has a caller that waits
        ("places", "2 1 1 2, 0 1 1"),  # one is left for a caller that is awake
        ("looks", "4 5"),  # four looks in vain are enough, until a job follows another at once
    ],
)
def test_workers_serve_waiting_callers_and_do_not_look_in_vain(
    pool_program: Path, what: str, output: str
) -> None:
    done = subprocess.run([pool_program, what], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{output}\n", "")
