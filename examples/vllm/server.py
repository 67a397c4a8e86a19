"""vLLM's servers and the proxy as processes, started with the commands of docs/how-to/vllm.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from examples.vllm.engine import ENVIRONMENT, START_S
from examples.vllm.report import FOLDER, ROOT, free_port

LOOK_S = 0.1

SMALL = (
    *("--model", str(FOLDER / "model"), "--served-model-name", "model"),
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32"),
)


class Service:
    """A process that serves HTTP at a port of 127.0.0.1, in a session of its own."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, environment: Mapping[str, str]
    ) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.log = FOLDER / f"{name}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | dict(environment),
                start_new_session=True,  # so that it ends with all that it has started
            )

    def started(self) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it has ended, or does not answer in time.
        """
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return
            except (URLError, TimeoutError, ConnectionError):
                time.sleep(LOOK_S)
        raise RuntimeError(f"{self.name} does not answer; {self.log} ends with:\n{self.said()}")

    def said(self) -> str:
        """Return the end of the server's log."""
        return self.log.read_text(errors="replace")[-3000:]

    def metrics(self) -> dict[str, float]:
        """Return what the server counts, by name, summed over labels."""
        found: dict[str, float] = {}
        with urlopen(f"{self.url}/metrics", timeout=60) as response:
            for line in response.read().decode().splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it as the system does that has no memory left."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self.kill()


class Server(Service):
    """`python -m vllm.entrypoints.openai.api_server`.

    Args:
        name: of its log.
        core: the only one that it computes on.
        connector: its --kv-transfer-config.
        arguments: further ones of the command line; the last of a kind counts.
        port: 0: any.
    """

    def __init__(
        self,
        name: str,
        core: int,
        connector: Mapping[str, Any],
        *arguments: str,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(self.port)),
            *("--host", "127.0.0.1", *SMALL, *arguments),
            *("--kv-transfer-config", json.dumps(dict(connector))),
        ]
        given = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(core), **(environment or {})}
        super().__init__(name, command, self.port, given)


class Proxy(Service):
    """`python -m kvplan.vllm.proxy` over servers."""

    def __init__(
        self,
        name: str,
        prefill: Sequence[Server],
        decode: Sequence[Server],
        *arguments: str,
        timeout_s: float = 60,
    ) -> None:
        port = free_port()
        command = [sys.executable, "-m", "kvplan.vllm.proxy", "--port", str(port)]
        for role, servers in (("--prefill", prefill), ("--decode", decode)):
            for server in servers:
                command += [role, server.url]
        command += ["--prefill-timeout", str(timeout_s), *arguments]
        super().__init__(name, command, port, {})
