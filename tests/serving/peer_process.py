"""What a `Peer` has: workers by name, which its tests make."""

from typing import Any

from kvplan.serving import Source
from tests.serving.group_worker import GroupWorker
from tests.serving.worker import Worker, handle


def names() -> dict[str, Any]:
    return {"Worker": Worker, "GroupWorker": GroupWorker, "Source": Source, "handle": handle}
