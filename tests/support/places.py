"""The machines that suites run on, and the places of a test's processes, from the environment.

By default engines are on this host, linked over local. Tests marked `over_tcp` also run over TCP,
those marked `over_tcp(only=True)` only over TCP. Tests marked `over_ucx` also run over UCX, those
marked `over_hccl` on simulated Ascend devices, and those marked `over_cuda` on simulated CUDA
devices. tests/across/ runs suites with engines in other network namespaces.

KVPLAN_TEST_MACHINES: comma-separated. "tcp": only TCP, for all tests of tests/datadist and
    tests/faults; "ascend_tcp": tests of tests/datadist on simulated devices over TCP; "ucx",
    "ascend": marked tests, over UCX and on simulated devices; "cuda": tests of tests/datadist, and
    those marked for HCCL, on simulated CUDA devices. (tests/links has transports of its own.)
KVPLAN_TEST_TCP_CONNECTIONS: number of connections of a link over TCP; default 2.
KVPLAN_TEST_PEER_COMMAND: a JSON list of words before the command that starts a peer's process.
KVPLAN_TEST_IP, KVPLAN_TEST_PEER_IP: addresses at which engines of this process and of peers listen.
KVPLAN_TEST_CLUSTER_KEY: path of the cluster key of all engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # without pytest, peers, which import this, start in two thirds of the time
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
    """Parametrize a test with the machines that it runs on.

    Args:
        metafunc: the test.
        fixture: name of the fixture whose parameter is the machine, if the test uses it.
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
        fit.append("cuda")  # if KVPLAN_TEST_MACHINES names it
    names = MACHINES or (*usual, *(over_tcp if mark else []), *others)
    known = [item for item in names if item in fit]
    # Slow: devices, because the host runs the same tests; of marked tests, devices over TCP.
    repeated = () if MACHINES else ("ascend_tcp",) if mark else ("ascend",)
    marks = dict.fromkeys(repeated, pytest.mark.slow)
    metafunc.parametrize(
        fixture, [pytest.param(item, marks=marks.get(item, ())) for item in known], indirect=True
    )
