"""Attack the port of a listening engine, while a linked peer pulls from it.

    python tools/attack_data_port.py --count 500000

Sends random, mutated and replayed bytes to an engine with a cluster key and to one without, and
prints the results. Exits with 1 if an engine died, gave a forbidden answer, changed a byte in its
cache, failed a peer, or kept memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvplan import BlocksCacheKey, CacheDesc, ClusterInfo, DataType, LlmDataDist, LlmRole
from kvplan.control.auth import ClusterKey
from kvplan.control.zmtp import GREETING_NBYTES, greeting

DESC = CacheDesc(num_tensors=4, shape=(16, 16, 8, 128), data_type=DataType.DT_FLOAT16)
ENGINE, PEER, RECORDED = 1, 2, 3
HELD = 256  # connections at a time; below the engine's limit on pending ones
GROWTH_MIB = 64
RESET = struct.pack("2i", 1, 0)  # SO_LINGER: the port is free again at once


class Process:
    """This program in another role: it answers each line on stdin with a line of JSON."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            sys.exit(f"FAILED: process {self.process.args} ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(20)


def answer(state: dict[str, Any]) -> None:
    print(json.dumps(state), flush=True)


def options_of(arguments: list[str]) -> dict[str, str]:
    transport, key_file, *listen = arguments
    options = {"kvplan.transport": transport}
    if key_file:
        options["kvplan.cluster_key_file"] = key_file
    if listen:
        options["llm.ListenIpInfo"] = listen[0]
    return options


def run_engine(arguments: list[str]) -> None:
    """Offer a cache in which every byte of tensor i is i."""
    engine = LlmDataDist(ENGINE, LlmRole.PROMPT)
    engine.initialize(options_of(arguments))
    cache = engine.allocate_blocks_cache(DESC, BlocksCacheKey(ENGINE))
    for number, tensor in enumerate(engine.arrays(cache)):
        tensor[:] = number
    answer({"address": engine.listen_address})
    while sys.stdin.readline():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        arrays = enumerate(engine.arrays(cache))
        answer(
            {
                "resident_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
                "wrong_tensors": sum(bool(np.any(tensor != number)) for number, tensor in arrays),
            }
        )
    engine.finalize()


def run_peer(arguments: list[str]) -> None:
    """Link, and pull again and again; answer each request with the results since the last one."""
    address, cluster, *rest = arguments
    peer = LlmDataDist(int(cluster), LlmRole.DECODER)
    peer.initialize(options_of(rest))
    mine = peer.allocate_blocks_cache(DESC)
    peer.link_clusters([ClusterInfo(ENGINE, address)]).raise_for_status()
    answer({})
    took: list[float] = []
    wrong = 0
    while True:
        for tensor in peer.arrays(mine):
            tensor[:] = -1
        began = time.perf_counter()
        peer.pull_blocks(BlocksCacheKey(ENGINE), mine, [4, 5, 9], [7, 8, 2])
        took.append(time.perf_counter() - began)
        moved = (bool(np.any(array[[7, 8, 2]] != i)) for i, array in enumerate(peer.arrays(mine)))
        wrong += any(moved)
        if select.select([sys.stdin], [], [], 0.001)[0]:
            if not sys.stdin.readline():
                break
            answer({"pulls": len(took), "wrong": wrong, "us": statistics.median(took) * 1e6})
            took.clear()
    peer.finalize()


class Recorder:
    """A proxy in front of the engine; `sessions` has the bytes sent on each connection."""

    def __init__(self, host: str, target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server((host, 0))
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        self.sessions: list[bytearray] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            near, _ = self._listening.accept()
            far = socket.create_connection(self._target)
            self.sessions.append(bytearray())
            for ends in ((near, far, self.sessions[-1]), (far, near, bytearray())):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, said: bytearray) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                said += chunk
                target.sendall(chunk)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def words(chance: random.Random, sessions: list[bytes]) -> tuple[bytes, bool]:
    """Return the bytes to send on a connection, and True if the engine may answer them."""
    kind = chance.randrange(6)
    noise = chance.randbytes(chance.randrange(1, 200))
    session = bytearray(chance.choice(sessions))
    may_answer = session[:1] == b"\xff"  # a control connection, which needs no key to begin
    if kind == 0:
        return noise, False
    if kind == 1:
        return b"kvplan\1"[: chance.randrange(1, 8)] + noise, False
    if kind == 2:
        return greeting(encrypted=chance.random() < 0.5) + noise, True
    if kind == 3:
        return bytes(session), may_answer
    if kind == 4:
        for _ in range(chance.randrange(1, 9)):
            session[chance.randrange(min(len(session), 200))] = chance.randrange(256)
        return bytes(session), may_answer or session[:1] == b"\xff"
    return bytes(session[: chance.randrange(1, GREETING_NBYTES)]), may_answer


def attack(address: tuple[str, int], sessions: list[bytes], count: int, seed: int) -> int:
    """Make the connections; return the number of forbidden answers."""
    chance = random.Random(seed)
    held: deque[tuple[socket.socket, bool]] = deque()
    answered = 0
    for number in range(count + HELD):
        if len(held) == HELD or (held and number >= count):
            stream, may_answer = held.popleft()
            heard = b""
            with suppress(OSError):  # refused, or closed in favour of others
                while len(heard) <= GREETING_NBYTES and (chunk := stream.recv(4096)):
                    heard += chunk
                    if len(heard) >= GREETING_NBYTES:
                        stream.setblocking(False)
            answered += len(heard) > GREETING_NBYTES and not may_answer
            stream.close()
        if number < count:
            said, may_answer = words(chance, sessions)
            stream = socket.create_connection(address, 20)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            with suppress(OSError):
                stream.sendall(said)
            held.append((stream, may_answer))
    return answered


def own_address() -> str:
    """Return a non-loopback address of this host, where engines get no key by default."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError as error:
            sys.exit(f"no network interface but loopback: {error.strerror}; try --only key")
        return str(probe.getsockname()[0])


def settled(engine: Process, files: int) -> dict[str, Any]:
    """Return the engine's state once its open files are back to `files`, or after 30 s."""
    deadline = time.monotonic() + 30
    while (state := engine.ask())["files"] > files and time.monotonic() < deadline:
        time.sleep(0.1)
    return state


def try_engine(given: argparse.Namespace, host: str, key_file: str) -> bool:
    """Attack one engine; return True if it passed."""
    with ExitStack() as running:
        engine = Process("engine", given.transport, key_file, f"{host}:0")
        running.callback(engine.close)
        _, port = engine.first["address"].rsplit(":", 1)
        target = host, int(port)
        recorder = Recorder(host, target)
        recorded = Process("peer", recorder.address, str(RECORDED), given.transport, key_file)
        recorded.ask()
        recorded.close()
        sessions = [bytes(session) for session in recorder.sessions if session]
        peer = Process("peer", engine.first["address"], str(PEER), given.transport, key_file)
        running.callback(peer.close)
        idle = engine.ask()
        attack(target, sessions, 4 * HELD, given.seed)  # warm-up: one-time allocations
        before = settled(engine, idle["files"])
        peer.ask()
        time.sleep(given.quiet_s)
        quiet = peer.ask()
        began = time.monotonic()
        answered = attack(target, sessions, given.count, given.seed + 1)
        seconds = time.monotonic() - began
        busy = peer.ask()
        after = settled(engine, before["files"])
    growth = after["resident_mib"] - before["resident_mib"]
    kinds = ", ".join(f"{len(session)} B" for session in sessions)
    print(f"{'with' if key_file else 'without'} a key, at {host}; replayed: {kinds}")
    print(f"  {given.count} connections in {seconds:.0f} s ({given.count / seconds:.0f} a second)")
    print(f"  answered without a proof   {answered}")
    print(f"  tensors with another byte  {after['wrong_tensors']}")
    print(f"  memory, open files         {growth:+.1f} MiB, {after['files'] - before['files']:+d}")
    print(f"  a linked peer's pulls      {busy['pulls']}, {quiet['wrong'] + busy['wrong']} wrong")
    print(
        f"  of 3 blocks, median        {quiet['us']:.0f} us before, {busy['us']:.0f} us meanwhile"
    )
    wrong = answered or after["wrong_tensors"] or busy["wrong"] or quiet["wrong"]
    return not wrong and growth < GROWTH_MIB and after["files"] <= before["files"]


def main() -> int:
    if sys.argv[1:2] == ["engine"]:
        run_engine(sys.argv[2:])
        return 0
    if sys.argv[1:2] == ["peer"]:
        run_peer(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500_000, help="connections to each engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["key", "no-key"], help="one of the two engines")
    parser.add_argument("--transport", default="tcp", help="of the linked peer's pulls")
    parser.add_argument("--quiet-s", type=float, default=2.0, help="of pulls before the attack")
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        if given.only != "no-key":
            key_file = str(Path(directory) / "key")
            ClusterKey.generate().save(key_file)
            results.append(try_engine(given, "127.0.0.1", key_file))
        if given.only != "key":
            results.append(try_engine(given, own_address(), ""))
    print("as it must be" if all(results) else "FAILED")
    return not all(results)


if __name__ == "__main__":
    sys.exit(main())
