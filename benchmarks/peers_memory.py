"""Pulls from another process of this host, whose Python does not take part."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

from benchmarks.copying import (
    GIB,
    KIB,
    TENSOR_NBYTES,
    check_moved,
    columns_of,
    destination_of,
    execute,
    gigabytes,
    host_executor,
    scattered,
    source_of,
    team_of,
    tensor_addresses,
    threads_of,
)
from benchmarks.table import Row, Run, Topic, timed
from kvnative._executor import Executor
from kvplan.transport.local import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvplan.transport.local.link import LocalLink

TOPIC = Topic()
BLOCK, TOTAL = 32 * KIB, GIB
ROUNDS = 11


@contextmanager
def linked(kind: Literal["arena", "registered"]) -> Iterator[tuple[LocalLink, int, int]]:
    """Yield a link to a new process, the address of the pool there, and the process id."""
    command = [sys.executable, "-m", "benchmarks.peer", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        try:
            address, metadata = peer.stdout.readline().split()
            with (
                LocalTransport() as transport,
                transport.connect(bytes.fromhex(metadata.decode())) as link,
            ):
                yield link, int(address), peer.pid
        finally:
            peer.stdin.close()


@TOPIC.row("arena_ratio")
def arena(run: Run, name: str) -> Row:
    """Pull memory that both processes map, beside the same copy inside one process."""
    source, target, executor = source_of(run), destination_of(run), host_executor(run)
    with linked("arena") as (link, address, _):
        memory = link.memory(tensor_addresses(address), TENSOR_NBYTES)
        theirs = scattered(memory.addresses, target.bases, BLOCK, TOTAL)
        own = scattered(source.bases, target.bases, BLOCK, TOTAL)
        target.words[:] = 0
        execute(executor, theirs)
        check_moved(theirs, int(memory.addresses[0]), target)
        ours, inside = run.medians(
            timed(partial(execute, executor, theirs)),
            timed(partial(execute, executor, own)),
            rounds=ROUNDS,
        )
    note = f"{len(own):,} descriptors of 32 KiB; limit: the same copy inside one process"
    return Row(name, gigabytes(own, ours), "GB/s", gigabytes(own, inside), "at least", 0.90, note)


@TOPIC.row("registered_ratio")
def registered(run: Run, name: str) -> Row:
    """Pull ordinary memory of the peer, beside a bare loop over process_vm_readv."""
    target, team = destination_of(run), team_of(run)
    with linked("registered") as (link, address, pid):
        backend = link.reading(threads_of(run))
        descriptors = scattered(tensor_addresses(address), target.bases, BLOCK, TOTAL)
        with Executor(backend) as executor:
            target.words[:] = 0
            execute(executor, descriptors)
            check_moved(descriptors, address, target)
            ours, bare = run.medians(
                timed(partial(execute, executor, descriptors)),
                partial(team.readv_seconds, pid, columns_of(descriptors)),
                rounds=ROUNDS,
            )
    note = f"{len(descriptors):,} descriptors of 32 KiB; limit: bare loop, 1,024 ranges a call"
    figures = gigabytes(descriptors, ours), "GB/s", gigabytes(descriptors, bare)
    return Row(name, *figures, "at least", 0.95, note)
