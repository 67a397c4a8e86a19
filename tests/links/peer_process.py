"""A process with an `End`, that otherwise sits in a read on a pipe."""

import logging

import kvplan
from kvplan.links import ClusterInfo
from kvplan.transport.local import LocalTransport
from tests.links.end import DESC, End
from tests.transport.owner_process import serve

if __name__ == "__main__":
    logging.getLogger("kvplan").setLevel(logging.INFO)
    serve(
        {
            "ClusterInfo": ClusterInfo,
            "DESC": DESC,
            "End": End,
            "LocalTransport": LocalTransport,
            "kvplan": kvplan,
        }
    )
