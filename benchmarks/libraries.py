"""The libraries that do the paged work between two processes: kvplan, bare programs, competitors.

Competitors are tried with several settings; see `benchmarks.comparing.fastest`.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from benchmarks.compiled import compiled
from benchmarks.pairs import LOOPBACK, Library, Place
from benchmarks.table import Unmeasured
from kvplan.transport.tcp.transport import connections_of

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "build/peers"
"""The environment that `make bench-peers` creates."""

Memory = Literal["arena", "registered"]
Work = Literal["paged", "small"]

SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "256K"}
OVER_TCP = {
    "defaults": {},
    "segments of 256 KiB": SEGMENTS,
    "segments of 256 KiB, no zero-copy put": {**SEGMENTS, "UCX_TCP_PUT_ENABLE": "n"},
}
"""Settings of NIXL's UCX: with its default segments of 8 KiB a get takes very many messages."""

QUEUES = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "120000",
}
"""Settings of Mooncake, which by default refuses batches of more than 2,048 descriptors."""


def bare(place: Place, source: Literal["sockets.c", "exchange.c"] = "sockets.c") -> Library:
    """Return a pair of C programs with one TCP connection."""
    program = str(compiled(source, ""))

    def follow(line: str) -> list[str]:
        return [program, "follow", place.serving, str(json.loads(line)["port"])]

    return Library("bare sockets", "", [program, "serve", place.serving, "0"], follow)


def kvplan_over_tcp(
    place: Place, work: Work = "paged", connections: int | None = None, encrypt: bool = False
) -> Library:
    """Return kvplan over TCP; without `connections`, with the default number."""
    number = connections_of(_cores()) if connections is None else connections
    options = {
        "kvplan.transport": "tcp",
        "kvplan.tcp_connections": str(number),
        "kvplan.encrypt": str(+encrypt),
    }
    settings = f"connections: {number}{', encrypted' if encrypt else ''}"
    return _kvplan(place, settings, options, "arena", work)


def kvplan_connections_over_tcp(place: Place) -> list[Library]:
    """Return kvplan's settings over TCP."""
    most = max(2, _cores() // 2)
    return [kvplan_over_tcp(place, connections=number) for number in (1, 2, 4, 8) if number <= most]


def kvplan_on_one_host(memory: Memory, **options: str) -> Library:
    """Return kvplan between processes that reach each other's memory."""
    given = {f"kvplan.{name}": value for name, value in options.items()}
    words = ", ".join(["local", memory, *(f"{key}={value}" for key, value in given.items())])
    return _kvplan(LOOPBACK, words, {"kvplan.transport": "local", **given}, memory, "paged")


def _kvplan(
    place: Place, settings: str, options: dict[str, str], memory: Memory, work: Work
) -> Library:
    command = [sys.executable, "-m", "benchmarks.movers.engine", "--memory", memory]
    command += ["--work", work, *(f"--option={key}={value}" for key, value in options.items())]
    return Library(
        "kvplan",
        settings,
        [*command, "--address", place.serving],
        lambda line: [*command, "--address", place.moving, line],
    )


def nixl_over_tcp(place: Place) -> list[Library]:
    """Return NIXL's settings over TCP."""
    only = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": place.interface}
    workers = [number for number in (4, 8) if number <= _cores() // 2]
    return [
        _nixl(_threads(True), only, thread=True),
        *(
            _nixl(f"{worker} workers, segments of 256 KiB", {**only, **SEGMENTS}, workers=worker)
            for worker in workers
        ),
        *(
            _nixl(f"{_threads(False)}, {words}", {**only, **more})
            for words, more in OVER_TCP.items()
        ),
    ]


def nixl_on_one_host() -> list[Library]:
    """Return NIXL's settings with all of UCX's ways between processes of one host."""
    return [
        _nixl(f"{_threads(thread)}, {memory} memory", {}, thread=thread, memory=memory)
        for memory in ("ordinary", "huge", "shared")
        for thread in (False, True)
    ]


def nixl_on_gpu() -> list[Library]:
    """Return NIXL's settings between processes on one GPU: its UCX, with CUDA IPC."""
    # Its UCX opens the CUDA runtime, which may come from a wheel.
    wheels = [
        path for folder in sys.path for path in Path(folder).glob("nvidia/*/lib/libcudart.so.*")
    ]
    folders = dict.fromkeys(str(wheel.parent) for wheel in wheels)
    found = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), *folders]))
    return [
        _nixl(
            f"{_threads(thread)}, {words}",
            {**environment, "LD_LIBRARY_PATH": found},
            thread=thread,
            memory="gpu",
        )
        for words, environment in (("defaults", {}), ("cuda_ipc", {"UCX_TLS": "cuda,shm"}))
        for thread in (False, True)
    ]


def mooncake_environment() -> dict[str, str]:
    """Return variables that let Mooncake find its libraries, and log only errors."""
    # These folders have libibverbs, which TCP needs too, for systems without it.
    folders = [str(path) for path in (PEERS / "system").glob("**/x86_64-linux-gnu")]
    found = ":".join(filter(None, [*folders, os.environ.get("LD_LIBRARY_PATH")]))
    return {"LD_LIBRARY_PATH": found, "MC_LOG_LEVEL": "ERROR"}


def mooncake_over_tcp(place: Place) -> list[Library]:
    """Return Mooncake's settings over TCP."""
    python = peers_python()
    environment = mooncake_environment()

    def choice(words: str, most: int, more: dict[str, str]) -> Library:
        command = [python, "-m", "benchmarks.movers.mooncake", "--most", str(most), "--address"]
        return Library(
            "Mooncake",
            words,
            [*command, place.serving],
            lambda line: [*command, place.moving, line],
            {**environment, **more},
        )

    return [
        choice("batches of 2,048", 2048, {}),
        choice("one batch", 1 << 20, QUEUES),
        choice("one batch, 16 connections", 1 << 20, {**QUEUES, "MC_TCP_LANES_PER_PEER": "16"}),
    ]


def _nixl(
    settings: str,
    environment: dict[str, str],
    *,
    thread: bool = False,
    workers: int = 0,
    memory: str = "ordinary",
) -> Library:
    here = any(map(find_spec, ("nixl_cu12", "nixl_cu13")))
    python = sys.executable if here else peers_python()
    command = [python, "-m", "benchmarks.movers.nixl", "--workers", str(workers)]
    command += ["--thread", str(int(thread)), "--memory", memory]
    return Library(
        "NIXL", settings, command, lambda line: [*command, line], environment, spins=True
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _threads(progress: bool) -> str:
    return f"progress thread {'on' if progress else 'off'}"


def peers_python() -> str:
    python = PEERS / "bin/python"
    if not (PEERS / "ready").exists():
        raise Unmeasured("the peers are not installed: make bench-peers")
    return str(python)
