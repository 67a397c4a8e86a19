"""How soon a program sees what another engine says: one host, two processes."""

from __future__ import annotations

import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import libraries
from benchmarks.table import Row, Run, Topic, Unmeasured

TOPIC = Topic()
TIMES = 2000
BUDGET_US = 1000.0
MARK = "answer:"
MESSAGE = b"x" * 64


@TOPIC.row("notify_latency_us")
def latency(run: Run, name: str) -> Row:
    """From the beginning of the sender's call to the receiver's descriptor being readable.

    Not from the sender's return: that is after it, as the call waits for the receiver's answer.
    """
    times = TIMES // 4 if run.quick else TIMES
    seen, returned = kvplan_us(times)
    note = f"call to readable descriptor, one at a time; the call itself {returned:.0f} us; "
    try:
        limit, beside = nixl_us(times), "limit: NIXL's send_notif to get_new_notifs, which spins"
    except Unmeasured as error:
        return Row(name, seen, "us", BUDGET_US, note=f"{note}limit: the budget; NIXL: {error}")
    return Row(name, seen, "us", limit, note=note + beside)


def kvplan_us(times: int) -> tuple[float, float]:
    """Medians: until the receiver's descriptor is readable, and until the call returns."""
    from kvplan import ClusterInfo, LlmDataDist, LlmRole

    with receiver(sys.executable, "kvplan") as there, LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize()
        address = answer(there)
        engine.link_clusters([ClusterInfo(1, address)], 5000).raise_for_status()
        seen, returned = [], []
        for _ in range(times):
            begun = time.monotonic_ns()
            engine.notify(1, MESSAGE)
            returned.append(time.monotonic_ns() - begun)
            seen.append(int(answer(there)) - begun)
    return statistics.median(seen) / 1000, statistics.median(returned) / 1000


def nixl_us(times: int) -> float:
    """The same of NIXL, both ends in processes of its own."""
    with receiver(libraries.peers_python(), "nixl", str(times)) as sender:
        return float(answer(sender))


@contextmanager
def receiver(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this file, which ends when its stdin does."""
    python, *arguments = command
    process = subprocess.Popen(
        [python, "-m", "benchmarks.notifying", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def say(what: object) -> None:
    """Answer the process that has started this one."""
    print(MARK, what, flush=True)


def answer(process: subprocess.Popen[str]) -> str:
    """What a process says; what libraries write to its stdout is none of that."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            return line.removeprefix(MARK).strip()
    raise Unmeasured("a process has ended without an answer")


def receive_kvplan() -> None:
    """Say where this engine listens, then when each notification was seen."""
    from kvplan import LlmDataDist, LlmRole

    with LlmDataDist(1, LlmRole.PROMPT) as engine:
        engine.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
        say(engine.listen_address)
        arrived = engine.notifications()
        while True:
            select.select([arrived], [], [])
            now = time.monotonic_ns()
            for _ in arrived:
                say(now)


def receive_nixl() -> None:
    """Exchange names over stdio, then say when each notification was seen."""
    agent = _nixl_agent("receiving")
    say(agent.get_agent_metadata().hex())
    while True:
        found = agent.get_new_notifs()
        now = time.monotonic_ns()
        for _ in range(sum(map(len, found.values()))):
            say(now)


def send_nixl(times: int) -> None:
    """Start the receiver, and say the median in microseconds."""
    agent = _nixl_agent("sending")
    with receiver(sys.executable, "nixl-receiver") as there:
        peer = agent.add_remote_agent(bytes.fromhex(answer(there)))
        peer = peer.decode() if isinstance(peer, bytes) else peer
        seen = []
        for _ in range(times):
            begun = time.monotonic_ns()
            agent.send_notif(peer, MESSAGE)
            seen.append(int(answer(there)) - begun)
    say(statistics.median(seen) / 1000)


def _nixl_agent(name: str):  # type: ignore[no-untyped-def]
    from nixl_cu12 import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=True))


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "kvplan":
        receive_kvplan()
    elif role == "nixl":
        send_nixl(int(rest[0]))
    else:
        receive_nixl()
