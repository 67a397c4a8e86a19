"""The names that snippets in a `Peer` can use: they make workers by name."""

from typing import Any

from kvplan.serving import Source
from tests.serving.group_worker import GroupWorker
from tests.serving.worker import Worker, handle


def names() -> dict[str, Any]:
    return {"Worker": Worker, "GroupWorker": GroupWorker, "Source": Source, "handle": handle}
