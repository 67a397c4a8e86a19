"""A process that listens, answers each request with Synced, and reports its state when asked."""

import json
import os
import sys
from pathlib import Path

from kvplan.control.auth import ClusterKey, Keys
from kvplan.control.channel import Channel
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Body, Synced
from kvplan.control.server import Server
from tests.control.conversation import LOCAL


class Counting:
    """Counts what has reached it."""

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


def main() -> None:
    key = ClusterKey.load(sys.argv[1]) if len(sys.argv) > 1 else None
    loop, handler = ControlLoop("listening"), Counting()
    loop.start()
    server = loop.run(Server.listen(loop, LOCAL, handler, Keys(key)))
    answer: dict[str, object] = {"endpoint": str(server.endpoint)}
    while True:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if not sys.stdin.readline():
            break
        answer = {
            "requests": handler.requests,
            "notices": handler.notices,
            "refused": loop.refusals.count,
            "conversations": len(server.channels),
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "resident_mib": resident_mib(),
        }
    loop.stop()


if __name__ == "__main__":
    main()
