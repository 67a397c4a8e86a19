"""kvplan's connector beside vLLM's NixlConnector, in the same run and in turns.

Both pairs of engines live at the same time, on the same two cores, and one of them is stopped
(SIGSTOP) while the other is measured. A prompt of 1,899 tokens has 42 MiB of KV cache. In a fresh
cache its blocks lie one after another, and a layer is one descriptor. vLLM gives blocks that were
used before in reverse order: then each block of each layer is one. Rows, as those of `make bench`,
go to build/vllm.jsonl.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.table import Row
from examples.vllm.engine import Engine
from examples.vllm.report import FOLDER, ROOT, TOKENS, Answer, Report, connector, free_port, prompts

JSON_LINES = ROOT / "build" / "vllm.jsonl"
BLOCKS = 480  # enough for 8 requests
ARGUMENTS = {"dtype": "bfloat16", "num_gpu_blocks_override": BLOCKS}
LENGTH = 1899  # tokens of the prompt, in 60 blocks
ROUNDS, EACH = 3, 2  # turns of a pair, and requests in each
WARM_UP = 2  # link, and touch pages
REST = 8 - WARM_UP - ROUNDS * EACH  # until all blocks have been used
IDLE_S = 10.0
FINISH = {"do_remote_decode": True}


def nixl(role: str) -> dict[str, Any]:
    """NixlConnector on a CPU."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 120},
    }


@dataclass(frozen=True)
class Times:
    """Times of some requests, in seconds."""

    first_token: tuple[float, ...]
    transfer: tuple[float, ...]

    def __str__(self) -> str:
        texts = []
        for name in ("transfer", "first_token"):
            ms = [1000 * item for item in getattr(self, name)]
            text = f"{statistics.median(ms):.1f} ms ({min(ms):.1f} to {max(ms):.1f})"
            texts.append(f"{name.replace('_', ' ')} {text}")
        return ", ".join(texts)


class Pair:
    """Two engines with one connector between them.

    Args:
        transfer: the metric of vLLM with the times of its transfers.
        variables: further ones of both processes.
    """

    def __init__(
        self,
        name: str,
        held: ExitStack,
        configs: tuple[Mapping[str, Any], Mapping[str, Any]],
        transfer: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._transfer = name, transfer
        engines = []
        for core, (role, config) in enumerate(zip(("prefill", "decode"), configs, strict=True)):
            environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), **(variables or {})}
            engines.append(
                Engine(
                    f"{name}-{role}",
                    FOLDER,
                    core,
                    config,
                    environment,
                    **ARGUMENTS,
                )
            )
            held.callback(engines[-1].close)
        self.prefill, self.decode = self.engines = engines

    def send(self, number: signal.Signals) -> None:
        """Stop it, or let it go on."""
        for engine in self.engines:
            engine.send(number)

    def finished(self, prompt: list[int]) -> Mapping[str, Any]:
        """Let one compute a prompt."""
        return self.prefill.generate([prompt], 1, [FINISH])[0].params or {}

    def fetch(self, prompt: list[int], times: int) -> None:
        """Let the other fetch a prompt that the one has computed, and forget it."""
        for _ in range(times):
            self.decode.forget()
            self.decode.generate([prompt], 1, [self.finished(prompt)])

    def first_token(self, prompt: list[int]) -> tuple[float, float]:
        """Return the seconds until the other has generated a token, and those of the transfer."""
        params = self.finished(prompt)
        self.decode.forget()
        before = self.decode.metrics()
        self.decode.generate([prompt], 1, [params])
        after = self.decode.metrics()
        count = after[f"{self._transfer}_count"] - before.get(f"{self._transfer}_count", 0.0)
        if count != 1:
            raise RuntimeError(f"{self.name}: {count:.0f} transfers instead of 1")
        moved = after[f"{self._transfer}_sum"] - before.get(f"{self._transfer}_sum", 0.0)
        return self.decode.took_s, moved

    def stale(self, prompts: list[list[int]]) -> list[Answer]:
        """Return the answers to parameters that are used again when others have the blocks."""
        params = [self.finished(prompt) for prompt in prompts]
        self.decode.forget()
        self.decode.generate(prompts, TOKENS, params)
        self.prefill.forget()
        others = [[1000 + index, *range(8)] for index in range(BLOCKS)]  # a block for each
        self.prefill.generate(others, 1)
        self.decode.forget()
        return self.decode.generate(prompts, TOKENS, params)


class Beside:
    """The measurements, in the order in which they are made."""

    def __init__(self, report: Report, held: ExitStack) -> None:
        self.report = report
        self.prompts = prompts()
        text = [token for prompt in self.prompts for token in prompt]
        self.prompt = text[:LENGTH]
        self.ours = Pair(
            "kvplan",
            held,
            (connector("kv_producer"), connector("kv_consumer")),
            "vllm:kvplan_transfer_seconds",
        )
        self.theirs = Pair(
            "nixl",
            held,
            (nixl("kv_producer"), nixl("kv_consumer")),
            "vllm:nixl_xfer_time_seconds",
        )
        self.pairs = (self.ours, self.theirs)
        self.alone = Engine("alone", FOLDER, 0, **ARGUMENTS)
        held.callback(self.alone.close)
        for value in (*self.ours.engines, *self.theirs.engines, self.alone):
            value.started()
        report.say("two pairs of engines, and one alone, are up")

    def run(self) -> None:
        """Measure all, and say it."""
        asked = self.prompts[13:16]
        for pair in self.pairs:
            pair.send(signal.SIGSTOP)
        right = self.alone.generate(asked, TOKENS)
        self.alone.send(signal.SIGSTOP)
        for pair in self.pairs:
            self._alone_on_machine(pair)
            pair.fetch(self.prompt, WARM_UP)
        contiguous = self._turns("blocks one after another")
        for pair in self.pairs:
            self._alone_on_machine(pair)
            pair.fetch(self.prompt, REST)
        reverse = self._turns("blocks in reverse order")
        idle = self._idle()
        for pair in self.pairs:
            self._alone_on_machine(pair)
            found = pair.stale(asked)
            wrong = sum(a.tokens != b.tokens for a, b in zip(right, found, strict=True))
            text = f"{pair.name}: stale parameters, {wrong} of {len(asked)} answers are of others"
            if pair is self.ours:
                self.report.check(text, ["other tokens"] if wrong else [])
            else:
                self.report.say(f"note    {text}")
        self._rows(contiguous, reverse, idle)

    def _alone_on_machine(self, pair: Pair) -> None:
        for item in self.pairs:
            item.send(signal.SIGCONT if item is pair else signal.SIGSTOP)

    def _turns(self, where: str) -> list[Times]:
        """Return the seconds to the first token, and of the transfer, of both pairs."""
        found: dict[str, list[tuple[float, float]]] = {item.name: [] for item in self.pairs}
        before = self.descriptors()
        for _ in range(ROUNDS):
            for pair in self.pairs:
                self._alone_on_machine(pair)
                found[pair.name] += [pair.first_token(self.prompt) for _ in range(EACH)]
        each = (self.descriptors() - before) / (ROUNDS * EACH)
        times = [Times(*zip(*found[item.name], strict=True)) for item in self.pairs]
        for pair, moment in zip(self.pairs, times, strict=True):
            text = f"{pair.name}, {where} ({each:.0f} descriptors of NIXL's): {moment}"
            self.report.say(f"note    {text}")
        return times

    def descriptors(self) -> float:
        """Return the number of descriptors that NIXL has moved so far."""
        self._alone_on_machine(self.theirs)
        return self.theirs.decode.metrics().get("vllm:nixl_num_descriptors_sum", 0.0)

    def _idle(self) -> dict[str, float]:
        """Percent of a core that idle engines use: of a pair, and of two without connector."""
        percent: dict[str, float] = {}
        for pair in self.pairs:
            self._alone_on_machine(pair)
            percent[pair.name] = self._used(*pair.engines)
            pair.send(signal.SIGSTOP)
        self.alone.send(signal.SIGCONT)
        percent["alone"] = 2 * self._used(self.alone)
        self.alone.send(signal.SIGSTOP)
        text = ", ".join(f"{name} {value:.1f}" for name, value in percent.items())
        self.report.say(f"note    percent of a core that two idle engines use: {text}")
        return percent

    @staticmethod
    def _used(*engines: Engine) -> float:
        time.sleep(1.0)  # what was stopped finds out
        began, before = time.monotonic(), sum(engine.cpu_s() for engine in engines)
        time.sleep(IDLE_S)
        used = sum(engine.cpu_s() for engine in engines) - before
        return 100 * used / (time.monotonic() - began)

    def _rows(self, contiguous: list[Times], reverse: list[Times], idle: dict[str, float]) -> None:
        rows = []
        for name, which, target in (
            ("vllm_transfer_over_nixl", "transfer", 0.7),
            ("vllm_ttft_over_nixl", "first_token", 1.0),
        ):
            medians: dict[str, tuple[float, float]] = {}
            cases: dict[str, float] = {}
            for case, times in (("contiguous", contiguous), ("reverse", reverse)):
                ours, theirs = (getattr(moment, which) for moment in times)
                medians[case] = statistics.median(ours), statistics.median(theirs)
                cases[case] = medians[case][0] / medians[case][1]
                cases[f"{case}, best of each"] = min(ours) / min(theirs)
            worst = max(medians, key=cases.__getitem__)
            value, limit = (1000 * median for median in medians[worst])
            rows.append(Row(name, value, "ms", limit, target=target, note=worst, cases=cases))
        own = max(0.0, idle["kvplan"] - idle["alone"])
        rows.append(Row("vllm_idle_cpu_percent", own, "% of a core", 2.0, cases=idle))
        JSON_LINES.write_text("".join(f"{row.to_json()}\n" for row in rows))
        for row in rows:
            self.report.say(f"{'met   ' if row.met else 'MISSED'}  {'  '.join(row.cells())}")


def over_kvplan(report: Report) -> None:
    """Compare the tokens of vLLM's NixlConnector over kvplan's `nixl` with those of one engine."""
    # What `python -m kvplan.run --as nixl` sets: vLLM starts its own interpreter.
    launcher = ROOT / "kvplan" / "run" / "path"  # as `python -m kvplan.run --as nixl` sets both
    variables = {"KVPLAN_AS": "nixl", "PYTHONPATH": os.pathsep.join([str(launcher), str(ROOT)])}
    with ExitStack() as held:
        configs = nixl("kv_producer"), nixl("kv_consumer")
        pair = Pair("nixl-over-kvplan", held, configs, "vllm:nixl_xfer_time_seconds", variables)
        alone = Engine("alone", FOLDER, 0, **ARGUMENTS)
        held.callback(alone.close)
        for engine in (*pair.engines, alone):
            engine.started()
        asked = prompts()[13:16]
        right = alone.generate(asked, TOKENS)
        params = [pair.finished(prompt) for prompt in asked]
        found = pair.decode.generate(asked, TOKENS, params)
        wrong = sum(a.tokens != b.tokens for a, b in zip(right, found, strict=True))
        moved = pair.decode.metrics().get("vllm:nixl_num_descriptors_sum", 0.0)
        text = f"NixlConnector over kvplan, {moved:.0f} descriptors: the tokens of one engine"
        report.check(text, ["other tokens"] if wrong or not moved else [])


def run(report: Report) -> None:
    """Measure."""
    with ExitStack() as held:
        Beside(report, held).run()
