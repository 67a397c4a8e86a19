"""LMCache's own benchmark of its transfer channels, over NIXL, over Mooncake and over kvplan.

LMCache is unmodified. Its server fills objects; its client reads some of them and compares bytes.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from contextlib import ExitStack

from benchmarks import libraries
from benchmarks.table import Row, Run, Topic, Unmeasured

TOPIC = Topic()
INSTALLED = libraries.ROOT / "build/lmcache"
"""The folder that `make bench-lmcache` creates."""
PYTHON = libraries.ROOT / "build/vllm/env/bin/python"

PROGRAM = "lmcache.tools.transfer_channel_benchmark"
OBJECTS, OBJECT_MIB, POOL = 64, 1, 200
SIZES = ["--page-size", "64KB", "--object-size", f"{OBJECT_MIB}MB"]
READS = 20
ROUNDS = 5
PATIENCE_S = 120


class Channel:
    """A running server of one of LMCache's channels, and the clients that read from it."""

    def __init__(self, opened: ExitStack, kind: str, over: list[str]) -> None:
        ports = _free_ports(3)
        channel, catalog, self._client = (f"127.0.0.1:{port}" for port in ports)
        self._command = [str(PYTHON), *over, "-m", PROGRAM, "--transfer-channel-type", kind, *SIZES]
        self._command += ["--url", channel, "--control-url", catalog]
        pool = ["--buffer-size", "512MB", "--num-source-objects", str(POOL)]
        server = subprocess.Popen(
            [*self._command, "--role", "server", *pool, "--server-timeout", "3600"],
            env=_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        opened.enter_context(server)
        opened.callback(server.kill)

    def seconds(self) -> float:
        """Return the median seconds of a read of OBJECTS objects, which the client prints.

        Raises:
            RuntimeError: the client failed, or read wrong bytes.
        """
        reads = ["--num-objects", str(OBJECTS), "--iters", str(READS), "--warmup", "3", "--verify"]
        client = ["--role", "client", "--listen-url", self._client, *reads]
        ended = subprocess.run(
            [*self._command, *client],
            check=False,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        median = re.search(r"median : +([0-9.]+) ms", ended.stdout)
        if ended.returncode or median is None or "verify OK" not in ended.stdout:
            raise RuntimeError(f"LMCache's client: {(ended.stdout + ended.stderr)[-1000:]}")
        return float(median[1]) / 1e3


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        **libraries.mooncake_environment(),
        "PYTHONPATH": os.pathsep.join((str(libraries.ROOT), str(INSTALLED))),
    }


def _free_ports(number: int) -> list[int]:
    with ExitStack() as opened:
        servers = [
            opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [server.getsockname()[1] for server in servers]


def channel_row(run: Run, name: str, kind: str, surface: str) -> Row:
    """Compare LMCache's reads over kvplan with reads over the library, both with defaults."""
    if not (INSTALLED / "ready").exists():
        raise Unmeasured("LMCache is not installed: make bench-lmcache")
    with ExitStack() as opened:
        theirs = Channel(opened, kind, [])
        ours = Channel(opened, kind, ["-m", "kvplan.run", "--as", surface])
        us, them = run.medians(ours.seconds, theirs.seconds, rounds=ROUNDS)
    mib = OBJECTS * OBJECT_MIB
    note = (
        f"{1e3 * us:.1f} ms beside {1e3 * them:.1f} ms of the library with its defaults, for "
        f"{OBJECTS} objects of {OBJECT_MIB} MiB in pages of 64 KiB; all bytes compared"
    )
    return Row(name, mib / us / 1024, "GiB/s", mib / them / 1024, "at least", 1.0, note)


@TOPIC.row("lmcache_channel_over_nixl")
def over_nixl(run: Run, name: str) -> Row:
    """LMCache's channel of NIXL over `kvplan.nixl`."""
    return channel_row(run, name, "nixl", "nixl")


@TOPIC.row("lmcache_channel_over_mooncake")
def over_mooncake(run: Run, name: str) -> Row:
    """LMCache's channel of Mooncake over `kvplan.mooncake`."""
    return channel_row(run, name, "mooncake_te", "mooncake")
