"""What the suites run over, and where the processes of a test are: as the environment says.

By default engines are on this host, linked over local; tests marked `over_tcp` run over TCP too,
and those marked `over_tcp(only=True)` over TCP alone; those marked `over_ucx` over UCX as
well, those marked `over_hccl` on simulated Ascend devices, and those marked `over_cuda` on CUDA's.
Suites whose engines another network namespace has are run by tests/across/.

KVPLAN_TEST_MACHINES: comma-separated; "tcp": all tests of tests/datadist and tests/faults over TCP,
    and over nothing else; "ascend_tcp": those of tests/datadist on simulated devices over TCP;
    "ucx", "ascend": those that are marked, over UCX, and on simulated devices; "cuda": those of
    tests/datadist, and those marked for HCCL, on simulated CUDA devices, whose memory peers map.
    (tests/links is about the conversation, and has transports of its own.)
KVPLAN_TEST_TCP_CONNECTIONS: how many their links have then; else 2.
KVPLAN_TEST_PEER_COMMAND: a JSON list of words before the command that starts a peer's process.
KVPLAN_TEST_IP, KVPLAN_TEST_PEER_IP: where engines of this process, and of peers, listen.
KVPLAN_TEST_CLUSTER_KEY: path of the cluster key that all engines have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # peers, which import this, start in two thirds of the time without
    import pytest

MACHINES = tuple(filter(None, os.environ.get("KVPLAN_TEST_MACHINES", "").split(",")))
TCP_CONNECTIONS = int(os.environ.get("KVPLAN_TEST_TCP_CONNECTIONS", "2"))
PEER_COMMAND: tuple[str, ...] = tuple(json.loads(os.environ.get("KVPLAN_TEST_PEER_COMMAND", "[]")))
IP = os.environ.get("KVPLAN_TEST_IP", "127.0.0.1")
PEER_IP = os.environ.get("KVPLAN_TEST_PEER_IP", "127.0.0.1")
CLUSTER_KEY = os.environ.get("KVPLAN_TEST_CLUSTER_KEY", "")

LISTEN = f"{IP}:0"
PEER_LISTEN = f"{PEER_IP}:0"


def parametrize(metafunc: pytest.Metafunc, fixture: str, usual: Sequence[str]) -> None:
    """Run a test on each of the machines that there are for it.

    Args:
        metafunc: the test.
        fixture: that has the machine's name as its parameter, if the test uses it.
        usual: machines of tests that are not marked.
    """
    import pytest

    if fixture not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("over_tcp")
    over_tcp = ["tcp", *(["ascend_tcp"] if "ascend" in usual else [])]
    others = [
        name
        for name, marker in (("ucx", "over_ucx"), ("ascend", "over_hccl"), ("cuda", "over_cuda"))
        if metafunc.definition.get_closest_marker(marker)
    ]
    fit = over_tcp if mark and mark.kwargs.get("only") else [*usual, *over_tcp, *others]
    if "ascend" in fit and "cuda" not in fit:
        fit.append("cuda")  # where it is asked for
    names = MACHINES or (*usual, *(over_tcp if mark else []), *others)
    known = [item for item in names if item in fit]
    # Not with QUICK=1: what has run on the host, and devices over TCP where both have run alone.
    repeated = () if MACHINES else ("ascend_tcp",) if mark else ("ascend",)
    marks = dict.fromkeys(repeated, pytest.mark.slow)
    metafunc.parametrize(
        fixture, [pytest.param(item, marks=marks.get(item, ())) for item in known], indirect=True
    )
