"""The tests' side of owner_process.py: start one, ask it, end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("owner_process.py")


class Owner:
    """A peer in a process of its own; `prefix` is a command that starts it (unshare, say)."""

    script = SCRIPT

    def __init__(self, *, prefix: Sequence[str] = (), arguments: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(self.script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        self.pid: int = self.run("import os; result = os.getpid()")

    def run(self, *code: str) -> Any:
        """Execute the snippets there, one after another; returns their `result`."""
        self.send(*code)
        return self.answer()

    def send(self, *code: str) -> None:
        """As `run`, and do not wait: `answer` does."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps("\n".join(map(dedent, code))) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The `result` of what was sent."""
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def metadata(self) -> bytes:
        return str(self.run("result = transport.metadata().decode()")).encode()

    def stop(self) -> None:
        """SIGSTOP; on return it has stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once; on return it is dead, and a zombie until `close`."""
        os.kill(self.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.kill()
        self.process.wait()
