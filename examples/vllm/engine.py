"""A vLLM engine in a process of its own, on one core, which a program gives prompts to.

As a program it is that process: it reads requests from the connection that is its stdin.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from examples.vllm.report import ROOT, Answer

START_S, ANSWER_S = 300.0, 300.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_SERVER_DEV_MODE": "1",  # servers forget their prefix cache on request
}
SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "disable_log_stats": False,
}


class EngineDiedError(Exception):
    """The process has ended, or does not answer; the message says what it wrote."""


class Engine:
    """A process with a vLLM engine; `close` ends it and all that it has started.

    Args:
        name: of its log in `folder`.
        core: the only one that it computes on.
        connector: `kv_transfer_config`; None: it works alone.
        arguments: of vllm.LLM, besides those of SMALL.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        core: int,
        connector: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._connection, theirs = Pipe()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "examples.vllm.engine"],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": str(core)},
                start_new_session=True,  # so that it ends with all that it has started
            )
        theirs.close()
        given = {**SMALL, "model": str(folder / "model"), **arguments}
        if connector is not None:
            given["kv_transfer_config"] = dict(connector)
        self._connection.send(given)

    def started(self) -> None:
        """Wait until it takes requests."""
        self._receive(START_S)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        params: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[Answer]:
        """Generate greedily, all prompts at once."""
        self.begin(prompts, tokens, params)
        return self.ended()

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        params: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Begin to generate; `ended` has the answers."""
        given = [None] * len(prompts) if params is None else list(params)
        self._send("generate", [list(it) for it in prompts], tokens, given)

    def ended(self) -> list[Answer]:
        """The answers to the prompts that were begun."""
        return [Answer(*it) for it in self._receive(ANSWER_S)]

    def forget(self) -> None:
        """Let it forget its prefix cache."""
        self._send("forget")
        self._receive(ANSWER_S)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of vLLM, by name."""
        self._send("metrics")
        return dict(self._receive(ANSWER_S))

    def kill(self) -> None:
        """End it as the system does that has no memory left."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self.kill()
        self._connection.close()

    def _send(self, *request: Any) -> None:
        try:
            self._connection.send(request)
        except OSError:
            raise self._died() from None

    def _receive(self, timeout_s: float) -> Any:
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, OSError):
            pass
        raise self._died()

    def _died(self) -> EngineDiedError:
        written = self.log.read_text(errors="replace")[-3000:]
        return EngineDiedError(f"{self.name} does not answer; {self.log} ends with:\n{written}")


def serve(connection: Connection) -> None:
    """The process: make an engine of what comes first, and answer what follows."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    given = connection.recv()
    if (config := given.pop("kv_transfer_config", None)) is not None:
        given["kv_transfer_config"] = KVTransferConfig(**config)
    engine = LLM(**given)
    connection.send(None)
    while True:
        match connection.recv():
            case ("generate", prompts, tokens, params):
                sampling = [
                    SamplingParams(
                        temperature=0,
                        max_tokens=tokens,
                        ignore_eos=True,
                        extra_args=None if it is None else {"kv_transfer_params": dict(it)},
                    )
                    for it in params
                ]
                outputs = engine.generate(
                    [{"prompt_token_ids": it} for it in prompts], sampling, use_tqdm=False
                )
                connection.send(
                    [
                        (
                            list(it.outputs[0].token_ids),
                            it.outputs[0].finish_reason,
                            it.kv_transfer_params,
                        )
                        for it in outputs
                    ]
                )
            case ("forget",):
                connection.send(engine.reset_prefix_cache())
            case ("metrics",):
                found: dict[str, float] = {}
                for it in engine.get_metrics():
                    found[it.name] = found.get(it.name, 0.0) + getattr(it, "value", 0.0)
                connection.send(found)


if __name__ == "__main__":
    try:
        serve(Connection(0))
    except EOFError:
        os._exit(0)
