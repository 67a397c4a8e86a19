"""The tests' side of peer_process.py: start one, tell it what to do, end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.support.places import PEER_COMMAND, PEER_LISTEN

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("peer_process.py")


class Peer:
    """An engine `datadist` of cluster 1, listening at `address`, in a process of its own."""

    cluster_id = 1
    dead = False

    def __init__(self, machine: str = "host") -> None:
        self.process = subprocess.Popen(
            [*PEER_COMMAND, sys.executable, "-W", "error", str(SCRIPT), machine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        try:
            self.begin()
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Let it have an engine."""
        self.address: str = self.run(
            """
            datadist = LlmDataDist(1, LlmRole.PROMPT)
            datadist.initialize(options)
            result = datadist.listen_address
            """,
            options={"llm.ListenIpInfo": PEER_LISTEN},
        )

    def end(self) -> dict[str, int]:
        """End its engine, and all that was made there; returns what it has left of the device."""
        os.kill(self.process.pid, signal.SIGCONT)
        return dict(self.run("result = forget()"))

    def run(self, code: str, **values: object) -> Any:
        """Execute `code` there, with `values` (of JSON) as names; returns its `result`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        self.process.stdin.write(json.dumps(given + dedent(code)) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def kill(self) -> None:
        """End it at once; on return it is dead, and a zombie until `close`."""
        self.dead = True
        os.kill(self.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.kill()
        self.process.wait()
