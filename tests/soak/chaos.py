"""One round of chaos: three engines lease blocks to each other, and all that can happen happens.

    python -m tests.soak.chaos MACHINE SEED [STEPS]

Each engine has a process. They pull and push with leases that are released, expire and whose cache
is freed meanwhile; engines are finalized and begun again, stopped and killed. The seed says what is
done, in which order; what overlaps is the machine's affair. At one third and at the end all is
mended: then every engine must reach every other one, and what the processes hold is compared.

The last line says in JSON what was done. It exits with 1, and says what is wrong, if bytes were not
those of the request, if a process died or raised what it should not, or has grown.
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
from tests.soak.chaos_process import EXPECTED, LONG_MS, MOST_ROWS, NUM_BLOCKS, Job
from tests.support.peer import Peer, RemoteError
from tests.support.ucx_library import found as ucx_found
from tests.support.ucx_library import hide

MACHINES = ("local", "tcp", "ucx", "ascend", "ascend-tcp")
STEPS = 150
RENEWAL_S = 60
"""HCCL cannot be told to stop waiting for a peer, which an engine whose end came meanwhile has left
to a thread (`links/renewals.py`): until it gives up, after 30 s, the device is in use."""
CLUSTERS = (1, 2, 3)
SURVIVOR = 1  # is not killed, so that what it holds can be compared
KINDS = ("pull", "pull", "rows", "wait", "cancel", "push", "push", "layers")
ALLOWED = {"moved", "cancelled", *(item.name for item in EXPECTED)}
GROWTH_KIB = 8 << 10
SETTLED_S = 20
# Of UCX 42 to 48 descriptors come and go; a leak of one for each release would be some 30.
GROWTH = {"descriptors": 8, "mappings": 40}
MOST_THREADS = 4
# As many as transfers of an engine were in flight at once: they end with it. 31 threads were most.
CHANNELS, MOST_CHANNELS = ("kvn-acl", "kvsim-"), 16


class Wrong(Exception):  # noqa: N818 - what it says of kvplan
    """What soak looks for."""


@dataclass
class Leased:
    """A lease that stands, and the job that was given with it."""

    owner: int
    number: int
    user: int
    pushed: int | None
    kind: str


class Chaos:
    """The engines of a round.

    Args:
        machine: of `MACHINES`.
        seed: of what is done.
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
        self._surely: set[int] = set()  # stamps whose transfer has succeeded
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
        if self.random.random() < 0.5:  # those that are stopped keep their links
            options["kvplan.heartbeat_timeout_ms"] = "60000"
        return options

    def _launch(self, cluster: int) -> None:
        kind = "ascend" if self.machine.startswith("ascend") else "host"
        self._peers[cluster] = Process(kind)
        self.born[cluster] = self._peers[cluster].pid
        self._begin(cluster)

    def _begin(self, cluster: int) -> None:
        self._addresses[cluster] = self.ask(
            cluster,
            "start",
            cluster,
            self._options,
            self.block_words,
            self._registered[cluster],
        )

    def ask(self, cluster: int, method: str, *arguments: Any) -> Any:
        """Call a method of that process's `Home`."""
        return self._peers[cluster].run(f"result = home.{method}(*arguments)", arguments=arguments)

    def run(self, steps: int) -> dict[str, Any]:
        """Do it; returns what the processes held at one third and at the end, by cluster."""
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
                str(item): {"first": before, "last": last[item][1]}
                for item, (pid, before) in first.items()
                if last[item][0] == pid
            }
            try:
                check_growth(held)
            except Wrong:  # connections that have just ended may hold descriptors for some moments
                if time.monotonic() > deadline:
                    raise
            else:
                return held

    def step(self) -> None:
        """Some leases, then some trouble, then the end of some leases."""
        running = [cluster for cluster in CLUSTERS if cluster not in self._stopped]
        for _ in range(self.random.choice([1, 2, 4])):
            if running and len(self._leased) < 8:
                self._lease(self.random.choice(running))
        for _ in range(self.random.choice([0, 1, 5, 20, 60])):  # some 0.1 ms each
            if running:
                self._peers[running[0]].run("")
        self._trouble()
        for cluster in self.random.sample(self._leased, self.random.randint(0, len(self._leased))):
            if cluster.owner not in self._stopped:
                self._release(cluster)
        if self.random.random() < 0.6:
            self._resume()
        for cluster in CLUSTERS:
            if cluster not in self._stopped:
                if self.random.random() < 0.3 and not self._stopped:
                    self.ask(cluster, "join")
                self._take(cluster)
                self._hear(self.ask(cluster, "check"))

    def _lease(self, owner: int) -> None:
        user = self.random.choice([cluster for cluster in CLUSTERS if cluster != owner])
        kind = self.random.choice(KINDS)
        count = self.random.randint(1, MOST_ROWS)
        ttl_ms = self.random.choice([None, None, None, 0.3, 3.0, 1000.0])
        timeout_ms = self.random.choice([50, 2000, 20_000])
        rows = tuple(self.random.sample(range(NUM_BLOCKS), count))
        mover = self.random.randrange(2)
        if 4 * len([item for item in self._leased if item.owner == owner]) >= NUM_BLOCKS:
            return
        self._number, self._stamp = self._number + 1, self._stamp % 16_000 + 2
        lease = self.ask(owner, "lease", self._number, count, self._stamp, ttl_ms)
        pushes = kind in ("push", "layers")
        moved = self._stamp + pushes
        job = Job(kind, lease, moved, rows, owner, self._addresses[owner], timeout_ms)
        self._leased.append(Leased(owner, self._number, user, moved if pushes else None, kind))
        self._surely.discard(moved)
        if user in self._stopped:
            self._resume(user)
        self.ask(user, "do", mover, job)

    def _trouble(self) -> None:
        """Often none."""
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
            self._patiently(lambda: self.ask(cluster, "end"))
            self._take(cluster)
            self._forget(cluster)
            self._begin(cluster)
            self.counts["finalized"] += 1
        elif what < 0.28:
            self._patiently(lambda: self.ask(cluster, "recycle"))
            self._forget(cluster)
            self.counts["freed"] += 1
        elif what < 0.32:
            other = next(item for item in CLUSTERS if item != cluster)
            with self._refusable():
                self.ask(cluster, "link", other, self._addresses[other])
                self.counts["relinked"] += 1

    @contextmanager
    def _refusable(self) -> Iterator[None]:
        """A call that a stopped peer, or one that links at the same time, may make fail."""
        try:
            yield
        except RemoteError as error:
            if error.kind != "LLMException":
                raise
            self.counts["link refused"] += 1

    def _patiently(self, call: Callable[[], Any]) -> Any:
        """What waits for peers that write may time out while one is stopped."""
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
        """Its leases have gone with its cache."""
        self._leased = [item for item in self._leased if item.owner != cluster]

    def _release(self, leased: Leased) -> None:
        self._take_all()
        surely = leased.pushed is not None and leased.pushed in self._surely
        self._hear(
            self._patiently(
                lambda: self.ask(leased.owner, "release", leased.number, leased.pushed, surely)
            )
        )
        self._leased.remove(leased)
        self.counts["released"] += 1

    def _resume(self, cluster: int | None = None) -> None:
        for item in [cluster] if cluster else [*self._stopped]:
            self._peers[item].resume()
            self._stopped.discard(item)

    def _take_all(self) -> None:
        for cluster in CLUSTERS:
            if cluster not in self._stopped:
                self._take(cluster)

    def _take(self, cluster: int) -> None:
        """Count what has come of the jobs of that process."""
        for stamp, kind, outcome in self.ask(cluster, "take"):
            if outcome == "moved":
                self._surely.add(stamp)
            refused = outcome.startswith("link: ")
            if outcome not in ALLOWED and not refused:
                raise Wrong(
                    f"{kind} of stamp {stamp} in the process of cluster {cluster}: {outcome}"
                )
            self.counts[f"{kind} moved" if outcome == "moved" else outcome] += 1

    def _hear(self, wrong: str) -> None:
        if wrong:
            raise Wrong(wrong)

    def mend(self) -> None:
        """Let all go on and end; then each engine must reach each other one."""
        self._resume()
        for cluster in CLUSTERS:
            self.ask(cluster, "join")
            self._take(cluster)
        for lease in [*self._leased]:
            self._release(lease)
        for cluster in CLUSTERS:
            self._hear(self.ask(cluster, "check"))
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
            self._hear(self.ask(owner, "release", self._number, pushed, kind == "push"))

    def _held(self) -> dict[int, tuple[int, dict[str, Any]]]:
        """What each process holds."""
        return {
            cluster: (self.born[cluster], dict(self._peers[cluster].run("result = held()")))
            for cluster in CLUSTERS
        }

    def finish(self) -> None:
        """End all in order; nothing may be left."""
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
    """Raises `Wrong` if a process has more than at first, and more than comes and goes."""
    if "KVPLAN_SANITIZE" in os.environ:  # whose own memory grows
        return
    for cluster, text in held.items():
        first, last = text["first"], text["last"]
        for what, most in GROWTH.items():
            if last[what] > first[what] + most:
                raise Wrong(f"{what} of cluster {cluster} grew from {first[what]} to {last[what]}")
        new = Counter(last["threads"]) - Counter(first["threads"])
        many = sum(1 for element in new.elements() if not element.startswith(CHANNELS))
        if many > MOST_THREADS or new.total() > MOST_CHANNELS:
            raise Wrong(f"cluster {cluster} has new threads: {dict(new)}")
        if last["kib"] > first["kib"] + GROWTH_KIB:
            raise Wrong(
                f"memory of cluster {cluster} grew from {first['kib']} to {last['kib']} KiB"
            )
        open_first, open_last = (
            [item for item in held["registrations"] if item != "closed>"] for held in (first, last)
        )
        if len(open_last) > len(open_first):
            raise Wrong(f"registrations of cluster {cluster}: {last['registrations']}")


@contextmanager
def surroundings(machine: str, folder: Path) -> Iterator[None]:
    """The libraries of the machine, found by the processes of the round, and by no other."""
    os.environ["KVPLAN_ASCEND_LIBRARY"] = os.environ["KVPLAN_CUDA_LIBRARY"] = ""
    os.environ["KVPLAN_TUNING"] = "builtin"
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    # What the threads of the tests had of it is given back at once: what grows then is kvplan's.
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
    """Raises `Wrong`, or what a process died of; returns what was done."""
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
