"""A vLLM engine in a process of its own, on one core, which a program gives prompts to.

As a program it is that process: it reads requests from the connection that is its stdin.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from examples.vllm.report import ROOT, Answer

START_S, ANSWER_S = 300.0, 300.0

if __name__ in ("__main__", "__mp_main__"):  # the engine, and the workers that it spawns
    # These poll, and yield the processor in between. Linux 6.18 takes a slice of time from a thread
    # for each yield: where several workers share a core, each of their threads then stands still
    # for seconds and minutes. What vLLM does under older Pythons does not.
    os.sched_yield = lambda: time.sleep(0)

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
        core: the only one that it computes on; several workers: as vLLM has it, such as "0|1".
        connector: `kv_transfer_config`; None: it works alone.
        environment: further variables.
        arguments: of vllm.LLM, besides those of SMALL.

    Attributes:
        workers: how many it has.
        took_s: seconds that the engine itself needed for the last prompts.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        core: int | str,
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.name = name
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        self.workers = math.prod(int(arguments.get(size, 1)) for size in sizes)
        self.took_s = 0.0
        self.log = folder / f"{name}.log"
        self._connection, theirs = Pipe()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "examples.vllm.engine"],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    "VLLM_CPU_OMP_THREADS_BIND": str(core),
                    **(environment or {}),
                },
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
        tokens: int | Sequence[int],
        params: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[Answer]:
        """Generate greedily, all prompts at once; `tokens` of each."""
        self.begin(prompts, tokens, params)
        return self.ended()

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int | Sequence[int],
        params: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Begin to generate; `ended` has the answers."""
        given = [None] * len(prompts) if params is None else list(params)
        counts = [tokens] * len(prompts) if isinstance(tokens, int) else list(tokens)
        self._send("generate", [list(prompt) for prompt in prompts], counts, given)

    def ended(self) -> list[Answer]:
        """Return the answers to the prompts that were begun."""
        self.took_s, answers = self._receive(ANSWER_S)
        return [Answer(*answer) for answer in answers]

    def forget(self) -> None:
        """Let it forget its prefix cache."""
        self._send("forget")
        self._receive(ANSWER_S)

    def metrics(self) -> dict[str, float]:
        """Return what vLLM counts, by name; of a histogram its sum and count."""
        self._send("metrics")
        return dict(self._receive(ANSWER_S))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self._process.pid, number)

    def cpu_s(self) -> float:
        """Return the seconds of processors that all processes of the engine have used."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(") ")[2].split()
                if int(fields[2]) == self._process.pid:  # of this process group
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End it as the system does that has no memory left."""
        self.send(signal.SIGKILL)
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
    """Run the process: make an engine of what comes first, and answer what follows."""
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
                        max_tokens=count,
                        ignore_eos=True,
                        extra_args=None if param is None else {"kv_transfer_params": dict(param)},
                    )
                    for param, count in zip(params, tokens, strict=True)
                ]
                began = time.perf_counter()
                outputs = engine.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
                )
                took_s = time.perf_counter() - began
                ended = [(output.outputs[0], output.kv_transfer_params) for output in outputs]
                answers = [(list(item.token_ids), item.finish_reason, of) for item, of in ended]
                connection.send((took_s, answers))
            case ("forget",):
                connection.send(engine.reset_prefix_cache())
            case ("metrics",):
                found: dict[str, float] = {}
                for metric in engine.get_metrics():
                    for name, of in (("", "value"), ("_sum", "sum"), ("_count", "count")):
                        if hasattr(metric, of):
                            key = metric.name + name
                            found[key] = found.get(key, 0.0) + getattr(metric, of)
                connection.send(found)


if __name__ == "__main__":
    try:
        serve(Connection(0))
    except EOFError:
        os._exit(0)
