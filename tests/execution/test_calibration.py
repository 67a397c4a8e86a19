"""Which tuning a measurement ends with, on machines that are made up, clock and all."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvnative._executor import ThreadPool
from kvnative._tuning import NEVER, Tuning, builtin_tuning
from kvplan.execution import calibration
from kvplan.execution.calibration import BUDGET_MS, Calibration, calibrate
from kvplan.execution.tuning import Finding, choose, load_tuning, save_tuning, tuning_path

MIB = 1 << 20
BUILTIN = Tuning(4, 24 * MIB, 512 << 10)


class Machine:
    """One with a clock of its own, on which a copy takes what `ns` says.

    Args:
        ns: of a copy of so many bytes with a tuning.
        noise: up to so much of that comes on top, at random.
        share: of the cores is given to the threads.
        setup_ns: what each measurement takes besides.
    """

    def __init__(
        self,
        ns: Callable[[int, Tuning], float],
        noise: float = 0.0,
        share: float = 0.98,
        setup_ns: int = 100_000,
    ) -> None:
        self.now = 1_000_000_000
        self._ns, self._noise, self._share, self._setup_ns = ns, noise, share, setup_ns
        self._random = random.Random(7)

    def clock(self) -> int:
        return self.now

    def measure(
        self, tunings: Sequence[Tuning], nbytes: int, rounds: int, deadline_ns: int
    ) -> tuple[list[list[int]], float]:
        self.now += self._setup_ns
        done = []
        for _ in range(rounds):
            row = []
            for tuning in tunings:
                best = int(self._ns(nbytes, tuning))
                row.append(int(best * (1 + self._random.random() * self._noise)))
                self.now += 3 * row[-1]
                if self.now >= deadline_ns:
                    return done, self._share
            done.append(row)
        return done, self._share

    def tuned(self, builtin: Tuning = BUILTIN) -> Finding:
        return calibrate(builtin, self.measure, self.clock)


def usual(cache_nbytes: int = 24 * MIB) -> Callable[[int, Tuning], float]:
    """As built in: 60 GB/s in the cache, 15 past it, and 25 with stores that bypass it."""

    def ns(nbytes: int, tuning: Tuning) -> float:
        if nbytes >= tuning.bypass_nbytes:
            return nbytes / 25
        return nbytes / (60 if nbytes < cache_nbytes else 15)

    return ns


def test_a_machine_like_those_that_were_measured_is_as_built_in() -> None:
    found = Machine(usual()).tuned()
    assert (found.tuning, found.sure) == (BUILTIN, True)
    assert all("as built in" in it for it in found.reasons)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3, 0.5])
def test_noise_changes_nothing(noise: float) -> None:
    assert Machine(usual(), noise).tuned().tuning == BUILTIN


@pytest.mark.parametrize(
    ("cache_mib", "bypass_mib"), [(4, 8), (8, 8), (10, 16), (20, 24), (32, 32), (100, 64)]
)
def test_caches_of_another_size(cache_mib: int, bypass_mib: int) -> None:
    found = Machine(usual(cache_mib * MIB), 0.1).tuned()
    assert found.sure
    assert found.tuning == BUILTIN._replace(bypass_nbytes=bypass_mib * MIB)


def test_what_is_clearly_faster_is_used() -> None:
    def ns(nbytes: int, tuning: Tuning) -> float:
        faster = 0.8 if tuning.piece_nbytes == 1 << 20 else 1.0
        faster *= 0.8 if tuning.threads == 2 else 1.0
        return usual()(nbytes, tuning) * faster

    found = Machine(ns, 0.05).tuned()
    assert found.tuning == Tuning(2, 24 * MIB, 1 << 20)
    assert any(it.startswith("threads: 2, ") for it in found.reasons)


def test_a_little_faster_is_not() -> None:
    def ns(nbytes: int, tuning: Tuning) -> float:
        return usual()(nbytes, tuning) * (0.92 if tuning.threads == 2 else 1.0)

    assert Machine(ns).tuned().tuning.threads == 4


@pytest.mark.parametrize(
    "machine",
    [
        Machine(usual(4 * MIB), share=0.6),  # others have the cores, all the time
        Machine(usual(4 * MIB), noise=9.0),  # or now and then
        Machine(lambda *it: 100 * usual(4 * MIB)(*it)),  # or it is too slow to tell in time
    ],
)
def test_a_busy_machine_is_as_built_in_and_says_so(machine: Machine) -> None:
    found = machine.tuned()
    assert (found.tuning, found.sure) == (BUILTIN, False)
    assert "others used the machine; all is as built in" in found.reasons[0]


@pytest.mark.parametrize("slower", [1, 4, 20, 1000])
def test_the_time_is_kept(slower: int) -> None:
    """Only the copies that are under way when it is over come on top: three in a row."""
    machine = Machine(lambda *it: slower * usual()(*it))
    copy_ms = 3 * slower * usual()(32 * MIB, BUILTIN) / 1e6
    assert machine.tuned().took_ms <= BUDGET_MS + copy_ms + 1


def test_a_processor_that_cannot_write_past_the_caches() -> None:
    builtin = BUILTIN._replace(bypass_nbytes=NEVER)
    found = Machine(usual(4 * MIB)).tuned(builtin)
    assert (found.tuning, found.sure) == (builtin, True)
    assert not any("past the caches" in reason for reason in found.reasons)


def test_this_machine_can_be_measured() -> None:
    found = calibration.tune(builtin_tuning(), background=False, crowded=lambda: False)
    assert 1 <= found.tuning.threads <= builtin_tuning().threads
    assert found.reasons


def test_a_crowded_machine_is_not_measured() -> None:
    assert calibration.is_crowded() in (False, True)
    found = calibration.tune(builtin_tuning(), crowded=lambda: True)
    assert (found.tuning, found.sure) == (builtin_tuning(), False)
    assert found.reasons == ("more threads want to run than there are cores; all is as built in",)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvplan"


BACKGROUND = """
import sys, threading
import numpy as np
import kvplan
from kvplan.execution import default_transfers
desc = kvplan.CacheDesc(1, (4, 1 << 20), kvplan.DataType.DT_UINT8)
src, dst = (np.zeros((4, 1 << 20), np.uint8) for _ in range(2))
src[:] = 7
blocks = range(int(sys.argv[1]))
def move(blocks):
    rows = kvplan.Rows(desc, blocks)
    kvplan.execute(kvplan.plan(kvplan.Transfer(rows, rows), local="dst"), [src], [dst])
move(blocks)
assert (dst[: len(blocks)] == 7).all()
measuring = [it for it in threading.enumerate() if it.name == "kvplan-tuning"]
if sys.argv[2] == "wait":
    for it in measuring:
        it.join()
    print(default_transfers()._pool.tuning == kvplan.execution.tuning.choose("stored").tuning)
elif sys.argv[2] == "fork":
    import os
    for _ in range(20):
        if (child := os.fork()) == 0:
            move([3])
            os._exit(0 if (dst[3] == 7).all() else 1)
        assert os.waitpid(child, 0)[1] == 0
"""


def background(blocks: int, then: str, **environment: str) -> str:
    """A process that moves so many MiB, and what it says."""
    done = subprocess.run(
        # Python 3.12 and later warn of a fork beside threads, which is what is tried here.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BACKGROUND, str(blocks), then],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KVPLAN_TUNING": "auto", **environment},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_process_measures_after_its_first_large_transfer_and_stores_it(cache: Path) -> None:
    begun = cache / "tuning.lock"
    assert background(1, "wait") == "True\n"  # 1 MiB is not more than 1 MiB
    assert not cache.exists()
    assert background(2, "wait") == "True\n"
    found = load_tuning()  # None: others used the machine, and the next process tries again
    begun.unlink()
    assert background(2, "wait") == "True\n"
    assert begun.exists() == (found is None)


def test_what_is_not_sure_is_not_stored(cache: Path) -> None:
    busy = Machine(usual(4 * MIB), share=0.5).tuned()
    sure = Machine(usual(4 * MIB)).tuned(BUILTIN._replace(threads=2))
    pool = ThreadPool()
    Calibration(pool, lambda _: busy)._run()
    assert (pool.tuning, load_tuning()) == (builtin_tuning(), None)
    Calibration(pool, lambda _: sure)._run()
    stored = load_tuning()
    assert stored is not None
    assert pool.tuning == stored.tuning == sure.tuning
    assert stored.reasons == sure.reasons


@pytest.mark.parametrize("tuning", ["stored", "builtin", '{"threads": 1}'])
def test_no_process_measures_that_was_told_so(cache: Path, tuning: str) -> None:
    assert background(2, "wait", KVPLAN_TUNING=tuning).count("\n") == 1
    assert not cache.exists()


# Not with sanitizers, by its name: in a child of several threads they know no new ones.
@pytest.mark.parametrize("then", ["exit", pytest.param("fork", id="forked")])
def test_a_process_that_ends_or_forks_meanwhile(cache: Path, then: str) -> None:
    for _ in range(3):
        assert background(2, then) == ""


def test_one_process_measures_at_a_time(cache: Path) -> None:
    before = choose("auto").tuning
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom kvplan.execution.calibration import _only_one\n"
            "with _only_one() as only: print(only, flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    pool = ThreadPool(tuning=before)
    Calibration(pool)._run()
    assert not tuning_path().exists()
    holder.communicate("")
    save_tuning(Finding(before._replace(bypass_nbytes=5 * MIB), True, ("made up",), 1.0))
    Calibration(pool)._run()
    assert pool.tuning.bypass_nbytes == 5 * MIB


def sure(builtin: Tuning) -> Finding:
    return Finding(builtin._replace(bypass_nbytes=7 * MIB), True, ("made up",), 1.0)


def wait_until_measured() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvplan-tuning":
            thread.join()


def test_one_pool_of_a_process_measures_and_the_others_use_it(cache: Path) -> None:
    begun, go_on, found = threading.Event(), threading.Event(), []

    def find(builtin: Tuning) -> Finding:
        found.append(builtin)
        begun.set()
        assert go_on.wait(60)
        return sure(builtin)

    pools = [ThreadPool(), ThreadPool()]
    Calibration(pools[0], find).start()
    assert begun.wait(60)
    Calibration(pools[1], find).start()
    go_on.set()
    wait_until_measured()
    assert len(found) == 1
    assert [it.tuning.bypass_nbytes for it in pools] == [7 * MIB] * 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_it_measures_where_the_threads_of_its_pool_run(cache: Path) -> None:
    """Else what fewer threads do would be stored for all of the processors."""
    own, seen = os.sched_getaffinity(0), []

    def find(builtin: Tuning) -> Finding:
        seen.append(os.sched_getaffinity(0))
        return sure(builtin)

    one = {min(own)}
    os.sched_setaffinity(0, one)
    try:
        of_a_node = Calibration(ThreadPool(), find)
    finally:
        os.sched_setaffinity(0, own)
    of_a_node.start()
    wait_until_measured()
    assert seen == [one]
    assert load_tuning() is None
    os.sched_setaffinity(0, one)
    try:
        assert load_tuning() is not None
    finally:
        os.sched_setaffinity(0, own)


@pytest.mark.parametrize("what", ["symlink", "fifo", "dangling"])
def test_what_is_no_lock_file_is_neither_followed_nor_waited_for(cache: Path, what: str) -> None:
    cache.mkdir()
    precious, lock = cache / "precious", cache / "tuning.lock"
    if what == "fifo":
        os.mkfifo(lock)
    else:
        lock.symlink_to(precious)
    if what == "symlink":
        precious.write_text("of somebody")
    pool = ThreadPool()
    Calibration(pool, sure).start()
    wait_until_measured()
    assert (what == "fifo") == (pool.tuning != builtin_tuning())
    assert precious.exists() == (what == "symlink")
    assert what != "symlink" or precious.read_text() == "of somebody"


def test_nothing_is_measured_that_cannot_be_stored(tmp_path: Path) -> None:
    (tmp_path / "kvplan/tuning.lock").mkdir(parents=True)
    assert background(2, "wait", XDG_CACHE_HOME=str(tmp_path)) == "True\n"
    assert [it.name for it in (tmp_path / "kvplan").iterdir()] == ["tuning.lock"]
