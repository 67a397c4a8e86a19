"""The tests' side of peer_process.py: start one, tell it what to do, stop it, kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

from kvplan import ClusterInfo
from tests.support.places import PEER_COMMAND, PEER_LISTEN

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("peer_process.py")


class Peer:
    """A process; after `start` it has an engine `datadist`, listening at `address`."""

    def __init__(self, machine: str = "host") -> None:
        self.process = subprocess.Popen(
            [*PEER_COMMAND, sys.executable, "-W", "error", str(SCRIPT), machine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        self.cluster_id = 0
        self.address = ""
        self.dead = False

    def start(self, cluster_id: int, *, listen: str = PEER_LISTEN, **options: Any) -> None:
        self.cluster_id = cluster_id
        self.address = self.run(
            """
            datadist = LlmDataDist(cluster_id, LlmRole.MIX)
            datadist.initialize(Options(**options))
            result = datadist.listen_address
            """,
            cluster_id=cluster_id,
            options={"listen_ip_info": listen, **options},
        )

    @property
    def cluster(self) -> ClusterInfo:
        return ClusterInfo(self.cluster_id, self.address)

    def begin(self, code: str, **values: object) -> None:
        """Let it execute `code`, with `values` as names; `answer` must follow."""
        assert self.process.stdin is not None
        given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        self.process.stdin.write(json.dumps(given + dedent(code)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The `result` of what was begun."""
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def run(self, code: str, **values: object) -> Any:
        self.begin(code, **values)
        return self.answer()

    def make_cache(self, memory: str = "allocated", seed: int | None = 1) -> int:
        """Make a cache of DESC there, with its arrays as `arrays`; returns its id."""
        return int(
            self.run(
                "cache, arrays = make_cache(datadist, memory, seed); result = cache.cache_id",
                memory=memory,
                seed=seed,
            )
        )

    def state(self, cluster_id: int) -> str | None:
        found = self.run(
            "link = link_of(datadist, them); result = link and link.state.name", them=cluster_id
        )
        return None if found is None else str(found)

    def wait_for_state(self, cluster_id: int, state: str) -> str:
        """Wait for it there; returns the last error of the link."""
        code = "result = wait_for_state(datadist, them, LinkState[state])"
        return str(self.run(code, them=cluster_id, state=state))

    def kill(self) -> None:
        """End it at once; on return it is dead, and a zombie until `close`."""
        self.dead = True
        os.kill(self.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def stop(self) -> None:
        """SIGSTOP; on return it has stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()
