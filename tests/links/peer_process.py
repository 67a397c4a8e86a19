"""The names of a `Peer`: an `End` of cluster `cluster_id`."""

import logging
from typing import Any

import kvplan
from kvplan.links import ClusterInfo
from kvplan.transport.local import LocalTransport
from kvplan.transport.tcp.transport import TcpTransport
from tests.links.end import DESC, End


def names() -> dict[str, Any]:
    logging.getLogger("kvplan").setLevel(logging.INFO)
    return {
        "ClusterInfo": ClusterInfo,
        "DESC": DESC,
        "End": End,
        "LocalTransport": LocalTransport,
        "TcpTransport": TcpTransport,
        "kvplan": kvplan,
    }
