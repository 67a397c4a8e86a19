"""Notifications: time until a program sees the message of another engine on the same host."""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import libraries
from benchmarks.table import Row, Run, Topic, Unmeasured

TOPIC = Topic()
ROUNDS = 3
TIMES = 1000
MANY = 100_000
A_MINUTE_S = 60.0
BUDGET_US = 100.0
MARK = "answer:"
MESSAGE = b"x" * 64


@TOPIC.row("notify_latency_us")
def latency(run: Run, name: str) -> Row:
    """From the start of the sender's call until the receiver's program can see the message.

    NIXL has no descriptor: its receiver polls. kvplan's receiver polls here too, by `poll` on its
    descriptor without a timeout.
    """
    times = TIMES // 4 if run.quick else TIMES
    ours, theirs = [], []
    failure = ""
    for _ in range(ROUNDS):  # in turns: other work on the machine disturbs both
        ours.append(kvplan_us(times, "kvplan-asking"))
        if not failure:
            try:
                theirs.append(nixl_us(times))
            except Unmeasured as error:
                failure = str(error)
    seen, returned = (statistics.median(pair) for pair in zip(*ours, strict=True))
    note = f"call to readable descriptor; the call itself {returned:.0f} us; "
    if failure:
        return Row(name, seen, "us", BUDGET_US, note=f"{note}limit: the budget; NIXL: {failure}")
    return Row(
        name,
        seen,
        "us",
        statistics.median(theirs),
        note=f"{note}limit: NIXL's send_notif to get_new_notifs; both receivers ask all the time",
        cases={
            f"{who} {i}": item
            for who, them in (("kvplan", [a for a, _ in ours]), ("nixl", theirs))
            for i, item in enumerate(them)
        },
    )


@TOPIC.row("notify_wakeup_us")
def wakeup(run: Run, name: str) -> Row:
    """Notify a receiver that sleeps in `select`; the system takes most of this time."""
    times = TIMES // 4 if run.quick else TIMES
    ours, limits = [], []
    for _ in range(ROUNDS):
        ours.append(kvplan_us(times, "kvplan-sleeping")[0])
        limits.append(eventfd_us(times))
    return Row(
        name,
        statistics.median(ours),
        "us",
        statistics.median(limits),
        target=None,
        note="to a receiver that sleeps; limit: an eventfd written by another process",
    )


@TOPIC.row("notifications_per_s")
def throughput(run: Run, name: str) -> Row:
    """Notify from one thread, read in one program; number and order are checked."""
    from kvplan import ClusterInfo, LlmDataDist, LLMException, LlmRole, LLMStatusCode

    many = MANY // 4 if run.quick else MANY
    refused = 0
    counting = receiver(sys.executable, "kvplan-counting", str(many))
    with counting as there, LlmDataDist(2, LlmRole.DECODER) as engine:
        engine.initialize()
        engine.link_clusters([ClusterInfo(1, answer(there))], 5000).raise_for_status()
        begun = time.monotonic()
        for number in range(many):
            data = b"%64d" % number
            while True:
                try:
                    engine.notify(1, data)
                    break
                except LLMException as error:
                    if error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                        raise
                    refused += 1
        verdict = answer(there)
        seconds = time.monotonic() - begun
    if verdict != "all, in order":
        raise AssertionError(f"notifications were lost: {verdict}")
    return Row(
        name,
        many / seconds,
        "1/s",
        MANY / A_MINUTE_S,
        sense="at least",
        note=f"{many} of 64 B read in order, {refused} refused and sent again; "
        "limit: 100,000 a minute",
    )


def kvplan_us(times: int, receiving: str) -> tuple[float, float]:
    """Return the median times until the descriptor is readable, and until the call returns."""
    from kvplan import ClusterInfo, LlmDataDist, LlmRole

    with receiver(sys.executable, receiving) as there, LlmDataDist(2, LlmRole.DECODER) as engine:
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
    """Return the same median of NIXL, with both ends in other processes."""
    with receiver(libraries.peers_python(), "nixl", str(times)) as sender:
        return float(answer(sender))


def eventfd_us(times: int) -> float:
    """Return the median time until a process in `select` sees an eventfd that this one writes."""
    fd = os.eventfd(0)
    try:
        with receiver(sys.executable, "eventfd", str(fd), pass_fds=(fd,)) as there:
            answer(there)
            seen = []
            for _ in range(times):
                begun = time.monotonic_ns()
                os.eventfd_write(fd, 1)
                seen.append(int(answer(there)) - begun)
    finally:
        os.close(fd)
    return statistics.median(seen) / 1000


@contextmanager
def receiver(*command: str, pass_fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run this file in a process, which ends with its stdin."""
    python, *arguments = command
    process = subprocess.Popen(
        [python, "-m", "benchmarks.notifying", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
        cwd=Path(__file__).parents[1],
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def say(what: object) -> None:
    """Answer the parent process."""
    print(MARK, what, flush=True)


def answer(process: subprocess.Popen[str]) -> str:
    """Return the answer of a process; skip lines that libraries write to its stdout."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            return line.removeprefix(MARK).strip()
    raise Unmeasured("a process has ended without an answer")


def receive_kvplan(*, sleeps: bool) -> None:
    """Print the engine's address, then the time at which each notification was seen."""
    from kvplan import LlmDataDist, LlmRole

    with LlmDataDist(1, LlmRole.PROMPT) as engine:
        engine.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
        say(engine.listen_address)
        arrived = engine.notifications()
        poll = select.poll()
        poll.register(arrived, select.POLLIN)
        while True:
            while not poll.poll(None if sleeps else 0):
                pass
            now = time.monotonic_ns()
            if next(iter(arrived), None) is not None:  # one only: the next has its own time
                say(now)


def count_kvplan(many: int) -> None:
    """Print the engine's address, then whether `many` notifications came, in order."""
    from kvplan import LlmDataDist, LlmRole

    with LlmDataDist(1, LlmRole.PROMPT) as engine:
        engine.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
        say(engine.listen_address)
        arrived = engine.notifications()
        number = 0
        while number < many and arrived.wait(60_000):
            for _, data in arrived:
                if int(data) != number:
                    say(f"{int(data)} came where {number} was to come")
                    return
                number += 1
        say("all, in order" if number == many else f"{number} of {many} have come")


def receive_eventfd(fd: int) -> None:
    """Print the time at which an eventfd was seen to be readable, each time."""
    say("ready")
    while True:
        select.select([fd], [], [])
        now = time.monotonic_ns()
        os.eventfd_read(fd)
        say(now)


def receive_nixl() -> None:
    """Exchange names over stdio, then print the time at which each notification was seen."""
    agent = _nixl_agent("receiving")
    say(agent.get_agent_metadata().hex())
    while True:
        found = agent.get_new_notifs()
        now = time.monotonic_ns()
        for _ in range(sum(map(len, found.values()))):
            say(now)


def send_nixl(times: int) -> None:
    """Start the receiver, and print the median in microseconds."""
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
    if role in ("kvplan-sleeping", "kvplan-asking"):
        receive_kvplan(sleeps=role == "kvplan-sleeping")
    elif role == "kvplan-counting":
        count_kvplan(int(rest[0]))
    elif role == "eventfd":
        receive_eventfd(int(rest[0]))
    elif role == "nixl":
        send_nixl(int(rest[0]))
    else:
        receive_nixl()
