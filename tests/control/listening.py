"""The process of a `ListeningProcess`: a server that answers each request with Synced."""

import os
from pathlib import Path
from typing import Any

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.channel import Channel
from kvplan.control.connecting import Server
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Body, Synced
from tests.control.conversation import LOCAL


class Counting:
    """A handler that counts requests, notices and ends."""

    def __init__(self) -> None:
        self.requests = self.notices = self.lost = 0

    async def on_request(self, channel: Channel, body: Body) -> Body:
        self.requests += 1
        return Synced(version=self.requests)

    def on_notice(self, channel: Channel, body: Body) -> None:
        self.notices += 1

    def on_lost(self, channel: Channel, reason: str) -> None:
        self.lost += 1


def resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def names(*key_file: str) -> dict[str, Any]:
    loop, handler = ControlLoop("listening"), Counting()
    loop.start()
    keys = Keys(ClusterKey.load(*key_file) if key_file else None)
    server = loop.run(Server.listen(loop, LOCAL, handler, keys))

    def state() -> dict[str, int]:
        return {
            "requests": handler.requests,
            "notices": handler.notices,
            "refused": loop.refusals.count,
            "conversations": len(server.channels),
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "resident_mib": resident_mib(),
        }

    return {"endpoint": str(server.endpoint), "state": state}
