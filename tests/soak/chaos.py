"""A round of chaos: three engines lease blocks to each other while they are killed and stopped.

    python -m tests.soak.chaos MACHINE SEED [STEPS]

Each engine has a process. Engines pull and push with leases that are released, expire, or lose
their cache meanwhile; engines are finalized and started again, stopped and killed. The seed decides
the actions and their order, but not which of them overlap. After one third of the steps, and at the
end, all stopped engines resume and all jobs end. Then every engine must reach every other one, and
the resources of the processes are compared.

The last line is the counts of all actions as JSON. The round prints the failure and exits with 1 if
bytes of another request arrived, or if a process died, raised an unexpected error or has grown.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

from kvplan.control.auth import ClusterKey
from tests.soak.chaos_process import EXPECTED, LONG_MS, MAX_ROWS, NUM_BLOCKS, Job
from tests.support.peer import Peer, RemoteError
from tests.support.ucx_library import found as ucx_found
from tests.support.ucx_library import hide

MACHINES = ("local", "tcp", "ucx", "ascend", "ascend-tcp")
STEPS = 150
RENEWAL_S = 60
"""HCCL cannot stop waiting for a peer.

A finalized engine leaves that wait to a thread (`links/renewals.py`), so the device is in use until
HCCL gives up after 30 s.
"""
CLUSTERS = (1, 2, 3)
SURVIVOR = 1  # never killed, so that its resources can be compared
KINDS = ("pull", "pull", "rows", "wait", "cancel", "push", "push", "layers")
ALLOWED = {"moved", "cancelled", *(status.name for status in EXPECTED)}
GROWTH_KIB = 8 << 10
SETTLED_S = 20
# With UCX 42 to 48 descriptors come and go; a leak of one per release would be about 30.
GROWTH = {"descriptors": 8, "mappings": 40}
MAX_NEW_THREADS = 4
# The bound is the number of transfers of an engine that were in flight at once; their threads end
# with it. The largest number seen was 31.
CHANNELS, MAX_NEW_CHANNELS = ("kvn-acl", "kvsim-"), 16


class Wrong(Exception):  # noqa: N818 - what it says of kvplan
    """A violation of what this round checks."""


@dataclass
class Leased:
    """A lease that has not ended, and the job that uses it."""

    owner: int
    number: int
    user: int
    pushed: int | None
    kind: str


class Chaos:
    """The engines of a round.

    Args:
        machine: one of `MACHINES`.
        seed: the seed of all random choices.
        folder: for files of the round.
    """

    def __init__(self, machine: str, seed: int, folder: Path) -> None:
        self.random = Random(seed)
        self.machine = machine
        self.counts: Counter[str] = Counter()
        self.block_words = self.random.choice([1 << 10, 1 << 14, 1 << 17])
        self._options = self._settings(folder)
        self._registered = {cluster: self.random.random() < 0.5 for cluster in CLUSTERS}
        self._peers: dict[int, Peer] = {}
        self._addresses: dict[int, str] = {}
        self._stopped: set[int] = set()
        self._leased: list[Leased] = []
        self._stamp = self._number = 0
        self._confirmed: set[int] = set()  # stamps whose transfer has succeeded
        self.born: dict[int, int] = {}
        for cluster in CLUSTERS:
            self._launch(cluster)

    def _settings(self, folder: Path) -> dict[str, str]:
        options = {"llm.ListenIpInfo": "127.0.0.1:0"}
        if self.machine.endswith("tcp"):
            options["kvplan.transport"] = "tcp"
            options["kvplan.tcp_connections"] = str(self.random.choice([1, 2, 3]))
            if self.random.random() < 0.5:
                ClusterKey.generate().save(folder / "key")
                options["kvplan.cluster_key_file"] = str(folder / "key")
                options["kvplan.encrypt"] = "1"
        elif self.machine == "ucx":
            options["kvplan.transport"] = "ucx"
            options["kvplan.ucx_settings"] = '{"UCX_TLS": "shm"}'
        if self.random.random() < 0.5:  # so that stopped engines keep their links
            options["kvplan.heartbeat_timeout_ms"] = "60000"
        return options

    def _launch(self, cluster: int) -> None:
        kind = "ascend" if self.machine.startswith("ascend") else "host"
        self._peers[cluster] = Process(kind)
        self.born[cluster] = self._peers[cluster].pid
        self._start(cluster)

    def _start(self, cluster: int) -> None:
        self._addresses[cluster] = self.ask(
            cluster,
            "start",
            cluster,
            self._options,
            self.block_words,
            self._registered[cluster],
        )

    def ask(self, cluster: int, method: str, *arguments: Any) -> Any:
        """Call a method of the process's `Home`."""
        return self._peers[cluster].run(f"result = home.{method}(*arguments)", arguments=arguments)

    def run(self, steps: int) -> dict[str, Any]:
        """Take the steps; return the resources at one third and at the end, by cluster."""
        for _ in range(steps // 3):
            self.step()
        self.mend()
        first = self._held()
        for _ in range(steps - steps // 3):
            self.step()
        self.mend()
        deadline = time.monotonic() + SETTLED_S
        while True:
            last = self._held()
            held = {
                str(cluster): {"first": before, "last": last[cluster][1]}
                for cluster, (pid, before) in first.items()
                if last[cluster][0] == pid
            }
            try:
                check_growth(held)
            except Wrong:  # connections that have just ended may hold descriptors for a moment
                if time.monotonic() > deadline:
                    raise
            else:
                return held

    def step(self) -> None:
        """Lease some blocks, cause some trouble, then end some leases."""
        running = [cluster for cluster in CLUSTERS if cluster not in self._stopped]
        for _ in range(self.random.choice([1, 2, 4])):
            if running and len(self._leased) < 8:
                self._lease(self.random.choice(running))
        for _ in range(self.random.choice([0, 1, 5, 20, 60])):  # about 0.1 ms each
            if running:
                self._peers[running[0]].run("")
        self._cause_trouble()
        for leased in self.random.sample(self._leased, self.random.randint(0, len(self._leased))):
            if leased.owner not in self._stopped:
                self._release(leased)
        if self.random.random() < 0.6:
            self._resume()
        for cluster in CLUSTERS:
            if cluster not in self._stopped:
                if self.random.random() < 0.3 and not self._stopped:
                    self.ask(cluster, "join")
                self._take(cluster)
                self._raise_if(self.ask(cluster, "check"))

    def _lease(self, owner: int) -> None:
        user = self.random.choice([cluster for cluster in CLUSTERS if cluster != owner])
        kind = self.random.choice(KINDS)
        count = self.random.randint(1, MAX_ROWS)
        ttl_ms = self.random.choice([None, None, None, 0.3, 3.0, 1000.0])
        timeout_ms = self.random.choice([50, 2000, 20_000])
        rows = tuple(self.random.sample(range(NUM_BLOCKS), count))
        mover = self.random.randrange(2)
        if 4 * len([leased for leased in self._leased if leased.owner == owner]) >= NUM_BLOCKS:
            return
        self._number, self._stamp = self._number + 1, self._stamp % 16_000 + 2
        lease = self.ask(owner, "lease", self._number, count, self._stamp, ttl_ms)
        pushes = kind in ("push", "layers")
        moved = self._stamp + pushes
        job = Job(kind, lease, moved, rows, owner, self._addresses[owner], timeout_ms)
        self._leased.append(Leased(owner, self._number, user, moved if pushes else None, kind))
        self._confirmed.discard(moved)
        if user in self._stopped:
            self._resume(user)
        self.ask(user, "do", mover, job)

    def _cause_trouble(self) -> None:
        """Stop, kill, finalize, recycle or link an engine, each with some probability."""
        cluster, what = self.random.choice(CLUSTERS), self.random.random()
        if cluster in self._stopped:
            return
        if what < 0.12:
            self._peers[cluster].stop()
            self._stopped.add(cluster)
            self.counts["stopped"] += 1
        elif what < 0.15 and cluster != SURVIVOR:
            self._take(cluster)
            self._peers[cluster].kill()
            self._peers[cluster].close()
            self._forget(cluster)
            self._launch(cluster)
            self.counts["killed"] += 1
        elif what < 0.20:
            self._retry_while_stopped(lambda: self.ask(cluster, "end"))
            self._take(cluster)
            self._forget(cluster)
            self._start(cluster)
            self.counts["finalized"] += 1
        elif what < 0.28:
            self._retry_while_stopped(lambda: self.ask(cluster, "recycle"))
            self._forget(cluster)
            self.counts["freed"] += 1
        elif what < 0.32:
            other = next(item for item in CLUSTERS if item != cluster)
            with self._refusable():
                self.ask(cluster, "link", other, self._addresses[other])
                self.counts["relinked"] += 1

    @contextmanager
    def _refusable(self) -> Iterator[None]:
        """Count a link that fails because the peer is stopped or links at the same time."""
        try:
            yield
        except RemoteError as error:
            if error.kind != "LLMException":
                raise
            self.counts["link refused"] += 1

    def _retry_while_stopped(self, call: Callable[[], Any]) -> Any:
        """Repeat a call that times out while a stopped peer still writes."""
        while True:
            try:
                return call()
            except RemoteError as error:
                if "LLM_TIMEOUT" not in str(error):
                    raise
                if not self._stopped:
                    self.counts["held up by running peers"] += 1
                self.counts["held up"] += 1
                self._resume()

    def _forget(self, cluster: int) -> None:
        """Forget the leases of a cache that no longer exists."""
        self._leased = [leased for leased in self._leased if leased.owner != cluster]

    def _release(self, leased: Leased) -> None:
        self._take_all()
        confirmed = leased.pushed is not None and leased.pushed in self._confirmed
        self._raise_if(
            self._retry_while_stopped(
                lambda: self.ask(leased.owner, "release", leased.number, leased.pushed, confirmed)
            )
        )
        self._leased.remove(leased)
        self.counts["released"] += 1

    def _resume(self, cluster: int | None = None) -> None:
        for other in [cluster] if cluster else [*self._stopped]:
            self._peers[other].resume()
            self._stopped.discard(other)

    def _take_all(self) -> None:
        for cluster in CLUSTERS:
            if cluster not in self._stopped:
                self._take(cluster)

    def _take(self, cluster: int) -> None:
        """Count the outcomes of the process's jobs."""
        for stamp, kind, outcome in self.ask(cluster, "take"):
            if outcome == "moved":
                self._confirmed.add(stamp)
            refused = outcome.startswith("link: ")
            if outcome not in ALLOWED and not refused:
                raise Wrong(
                    f"{kind} of stamp {stamp} in the process of cluster {cluster}: {outcome}"
                )
            self.counts[f"{kind} moved" if outcome == "moved" else outcome] += 1

    def _raise_if(self, wrong: str) -> None:
        if wrong:
            raise Wrong(wrong)

    def mend(self) -> None:
        """Resume all engines and end their jobs; then each engine must reach each other one."""
        self._resume()
        for cluster in CLUSTERS:
            self.ask(cluster, "join")
            self._take(cluster)
        for lease in [*self._leased]:
            self._release(lease)
        for cluster in CLUSTERS:
            self._raise_if(self.ask(cluster, "check"))
            self.ask(cluster, "forget")
        for user, owner in permutations(CLUSTERS, 2):
            self._must_move(user, owner)

    def _must_move(self, user: int, owner: int) -> None:
        for kind in ("pull", "push"):
            self._number, self._stamp = self._number + 1, self._stamp % 16_000 + 2
            lease = self.ask(owner, "lease", self._number, 1, self._stamp, None)
            stamp = self._stamp + (kind == "push")
            job = Job(kind, lease, stamp, (0,), owner, self._addresses[owner], LONG_MS)
            self.ask(user, "do", 0, job)
            self.ask(user, "join")
            ((_, _, outcome),) = self.ask(user, "take")
            if outcome != "moved":
                raise Wrong(f"after all was mended, {kind} from {user} to {owner}: {outcome}")
            pushed = stamp if kind == "push" else None
            self._raise_if(self.ask(owner, "release", self._number, pushed, kind == "push"))

    def _held(self) -> dict[int, tuple[int, dict[str, Any]]]:
        """Return the resources of each process."""
        return {
            cluster: (self.born[cluster], dict(self._peers[cluster].run("result = held()")))
            for cluster in CLUSTERS
        }

    def finish(self) -> None:
        """End all engines and processes in order, and check that the devices are empty."""
        for cluster in CLUSTERS:
            self.ask(cluster, "end")
        until = time.monotonic() + RENEWAL_S
        for cluster in CLUSTERS:
            while left := self._peers[cluster].run("import gc; gc.collect(); result = left()"):
                if time.monotonic() > until:
                    raise Wrong(f"cluster {cluster} has left {left} of its device")
                time.sleep(0.5)
        for peer in self._peers.values():
            peer.finish()
            if peer.process.returncode:
                raise Wrong(f"process {peer.process.pid} ended with {peer.process.returncode}")

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class Process(Peer):
    module = "tests.soak.chaos_process"
    flags = ("-W", "error")


def check_growth(held: dict[str, Any]) -> None:
    """Raise `Wrong` if a process holds more than at first, beyond the usual variation."""
    if "KVPLAN_SANITIZE" in os.environ:  # the sanitizer's own memory grows
        return
    for cluster, text in held.items():
        first, last = text["first"], text["last"]
        for what, most in GROWTH.items():
            if last[what] > first[what] + most:
                raise Wrong(f"{what} of cluster {cluster} grew from {first[what]} to {last[what]}")
        new = Counter(last["threads"]) - Counter(first["threads"])
        new_threads = sum(1 for element in new.elements() if not element.startswith(CHANNELS))
        if new_threads > MAX_NEW_THREADS or new.total() > MAX_NEW_CHANNELS:
            raise Wrong(f"cluster {cluster} has new threads: {dict(new)}")
        if last["kib"] > first["kib"] + GROWTH_KIB:
            raise Wrong(
                f"memory of cluster {cluster} grew from {first['kib']} to {last['kib']} KiB"
            )
        open_first, open_last = (
            [entry for entry in held["registrations"] if entry != "closed>"]
            for held in (first, last)
        )
        if len(open_last) > len(open_first):
            raise Wrong(f"registrations of cluster {cluster}: {last['registrations']}")


@contextmanager
def surroundings(machine: str, folder: Path) -> Iterator[None]:
    """Provide the libraries of the machine to the processes of the round only."""
    os.environ["KVPLAN_ASCEND_LIBRARY"] = os.environ["KVPLAN_CUDA_LIBRARY"] = ""
    os.environ["KVPLAN_TUNING"] = "builtin"
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    # Memory that threads of the tests have freed is returned at once, so that only growth of kvplan
    # is seen.
    os.environ.update({"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"})
    hide()
    with ExitStack() as stack:
        if machine == "ucx":
            stack.enter_context(ucx_found())
        elif machine.startswith("ascend"):
            os.environ["KVSIM_DIR"] = str(folder)
            from tests.ascend.simulator import found

            stack.enter_context(found())
        yield


def one_round(machine: str, seed: int, steps: int) -> dict[str, Any]:
    """Run a round, and return its counts; raise `Wrong` or the error of a process."""
    with tempfile.TemporaryDirectory(prefix="kvplan-soak-") as name:
        folder = Path(name)
        with surroundings(machine, folder):
            chaos = Chaos(machine, seed, folder)
            try:
                held = chaos.run(steps)
                chaos.finish()
            finally:
                chaos.close()
    return {"counts": dict(chaos.counts), "held": held}


def main() -> None:
    machine, seed = sys.argv[1], int(sys.argv[2])
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else STEPS
    print(json.dumps(one_round(machine, seed, steps)))


if __name__ == "__main__":
    main()
