"""Links: the cost of making and keeping them, and of sharing one engine between many peers."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from benchmarks import libraries
from benchmarks.engines import OWN_CLUSTER, peers
from benchmarks.fan_in import KIB, FanIn, Result, measure
from benchmarks.filled_peer import Shape
from benchmarks.pairs import LOOPBACK, Pair
from benchmarks.table import Row, Run, Topic, timed
from kvplan import ClusterInfo, LlmDataDist, LlmRole

TOPIC = Topic()
MANY, PROCESSES = 64, 4
IDLE_S = 10
PULLERS, BURSTS, SUSTAINED_S = 32, 3, 5.0
CONTROL_DESCRIPTORS = 4
SHAPE = Shape(tensors=32, blocks=16, block_nbytes=32 << 10)


def one_link(run: Run, name: str, transport: str, limit_ms: float) -> Row:
    """Measure the time from an address to a link at both ends."""
    with ExitStack() as opened:
        clusters = opened.enter_context(peers(1, 1, transport=transport))
        seconds = link_seconds(run, opened, clusters, transport, rounds=41)
    return Row(name, 1e3 * seconds, "ms", limit_ms, note="another process; limit: the budget")


def many_links(run: Run, name: str, transport: str, limit_s: float) -> Row:
    """Measure many links at once, as a starting decode engine makes them."""
    with ExitStack() as opened:
        each = MANY // PROCESSES
        clusters = [
            item
            for number in range(PROCESSES)
            for item in opened.enter_context(peers(1 + number * each, each, transport=transport))
        ]
        seconds = link_seconds(run, opened, clusters, transport, rounds=11)
    note = f"{MANY} engines in {PROCESSES} processes, one call; limit: the budget"
    return Row(name, seconds, "s", limit_s, note=note)


def link_seconds(
    run: Run, opened: ExitStack, clusters: list[ClusterInfo], transport: str, rounds: int
) -> float:
    """Return the median seconds of `link_clusters`; clusters are unlinked in between."""
    datadist = opened.enter_context(LlmDataDist(OWN_CLUSTER, LlmRole.DECODER))
    datadist.initialize({"kvplan.transport": transport})
    link = timed(lambda: datadist.link_clusters(clusters, timeout_ms=30_000).raise_for_status())

    def once() -> float:
        seconds = link()
        datadist.unlink_clusters(clusters, timeout_ms=30_000).raise_for_status()
        return seconds

    (seconds,) = run.medians(once, rounds=rounds)
    return seconds


@TOPIC.row("link_pair_ms")
def link_pair(run: Run, name: str) -> Row:
    """Link to a process of the same host, over shared memory."""
    return one_link(run, name, "auto", 20)


@TOPIC.row("link_64_s")
def link_many(run: Run, name: str) -> Row:
    """Link over shared memory to 64 engines at once."""
    return many_links(run, name, "auto", 1)


@TOPIC.row("tcp_link_ms")
def tcp_link(run: Run, name: str) -> Row:
    """Link over TCP: control and data connections."""
    return one_link(run, name, "tcp", 5)


@TOPIC.row("tcp_link_64_s")
def tcp_link_many(run: Run, name: str) -> Row:
    """Link over TCP to 64 engines at once."""
    return many_links(run, name, "tcp", 0.3)


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


@TOPIC.row("tcp_idle_cpu_percent")
def idle(run: Run, name: str) -> Row:
    """Two idle linked engines; the busier one counts."""
    with Pair(libraries.kvplan_over_tcp(LOOPBACK, "small"), LOOPBACK) as pair:
        pair.seconds("facade", 100)
        before = [processor_seconds(pid) for pid in pair.pids]
        time.sleep(IDLE_S)  # being idle is what is measured
        after = [processor_seconds(pid) for pid in pair.pids]
    percent = [100 * (b - a) / IDLE_S for a, b in zip(before, after, strict=True)]
    note = f"of a core, linked, {IDLE_S} s; the other end {min(percent):.2f}; limit: the budget"
    return Row(name, max(percent), "%", 0.2, note=note)


def pulled_at_once(run: Run) -> Result:
    """Let one engine pull over TCP from many engines at once, each a process."""
    seconds = SUSTAINED_S / 4 if run.quick else SUSTAINED_S
    pulls = FanIn(PULLERS, SHAPE, "tcp", BURSTS, seconds)
    return cast("Result", run.share("fan-in", lambda: measure(pulls)))


@TOPIC.row("tcp_fairness")
def fairness(run: Run, name: str) -> Row:
    """Divide the fewest bytes from one peer by the most bytes from one peer."""
    result = pulled_at_once(run)
    note = (
        f"{PULLERS} processes, {SHAPE.nbytes // KIB**2} MiB a pull, {SUSTAINED_S:.0f} s, "
        f"{result.gigabytes_per_s:.1f} GB/s; limit: the budget"
    )
    return Row(name, result.fairness, "", 0.8, "at least", note=note)


@TOPIC.row("tcp_link_kib")
def link_memory(run: Run, name: str) -> Row:
    """Memory of the pulling process for each peer, after all pulls."""
    result = pulled_at_once(run)
    note = f"a peer's process gained {max(result.peer_kib)} at most; limit: the budget"
    return Row(name, result.link_kib, "KiB", 256, note=note)


@TOPIC.row("tcp_link_descriptors")
def descriptors(run: Run, name: str) -> Row:
    """Count descriptors of one pair of data connections and of the control connection: 3 and 4."""
    before, linked, _ = pulled_at_once(run).decode.descriptors
    note = f"with the {CONTROL_DESCRIPTORS} of its control connection; limit: the budget"
    limit = 3 + CONTROL_DESCRIPTORS
    return Row(name, (linked - before) // PULLERS, "", limit, note=note)
