"""Unlike tensor and pipeline parallelism: each worker fetches its heads and layers.

vLLM takes the cores of several workers as "0|1". All engines here share two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from examples.vllm.engine import Engine
from examples.vllm.live_engines import FINISH, leaks
from examples.vllm.model import make_even
from examples.vllm.report import FOLDER, TOKENS, Report, connector, differences, prompts

MODEL = FOLDER / "model-even"
BLOCKS = 400
# Seven workers share two cores, so that all takes long.
LIMITS = {"lease_ttl_ms": 120_000, "link_timeout_ms": 30_000, "pull_timeout_ms": 60_000}


class Parallel:
    """Engines of one worker, of two, and of two stages, all of which give and fetch."""

    def __init__(self, report: Report, held: ExitStack) -> None:
        self.report, self.held = report, held
        self.prompts = prompts()
        if not (MODEL / "config.json").exists():
            make_even(FOLDER / "model", MODEL)
        self.one = self.engine("parallel-1", 1)
        self.two = self.engine("parallel-2", 2)
        self.other = self.engine("parallel-2b", 2)
        self.stages = self.engine("parallel-stages", 1, 2)
        for value in (self.one, self.two, self.other, self.stages):
            value.started()
        self.report.say("engines of one, two and two workers, and of two stages, are up")
        self.alone = self.one.generate(self.prompts, TOKENS)

    def engine(self, name: str, workers: int, stages: int = 1) -> Engine:
        # Without the run that warms up compiled models, later stages of vLLM's on CPUs lack memory
        # for what they receive.
        warm = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
        item = Engine(
            name,
            FOLDER,
            "|".join(map(str, range(workers * stages))),
            connector("kv_both", **LIMITS),
            model=str(MODEL),
            tensor_parallel_size=workers,
            pipeline_parallel_size=stages,
            num_gpu_blocks_override=BLOCKS,
            **(warm if stages > 1 else {}),
        )
        self.held.callback(item.close)
        return item

    def run(self) -> None:
        """Make the checks."""
        self.moves("1 worker -> 2", self.one, self.two)
        self.moves("2 workers -> 1", self.two, self.one)
        self.moves("2 workers -> 2", self.two, self.other)
        self.moves("1 stage -> 2", self.one, self.stages)
        self.moves("2 stages -> 2 workers", self.stages, self.two)

    def moves(self, name: str, prefill: Engine, decode: Engine) -> None:
        for value in (prefill, decode):
            value.forget()
        numbers = range(len(self.prompts))
        before = fetched(decode)
        params = finished(prefill, [self.prompts[number] for number in numbers])
        found = decode.generate([self.prompts[number] for number in numbers], TOKENS, params)
        moved, total = fetched(decode) - before, sum(map(len, self.prompts))
        problems = differences(self.alone, found)
        problems += ["answers are errors"] if any(item.reason == "error" for item in found) else []
        if moved < total / 2:
            problems.append(f"only {moved:.0f} of {total} tokens were fetched")
        problems += leaks(prefill, decode)
        self.report.check(
            f"{name}: tokens are those of one worker alone, no block leaks",
            problems,
            f"{moved:.0f} of {total} tokens fetched",
        )


def finished(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Let an engine compute prompts; returns what travels with them."""
    answers = engine.generate(prompts, 1, [FINISH] * len(prompts))
    return [answer.params or {} for answer in answers]


def fetched(engine: Engine) -> float:
    """Tokens that its workers have fetched so far: vLLM's own count has failures, too."""
    return engine.metrics()["vllm:kvplan_tokens_fetched"] / engine.workers


def run(report: Report) -> None:
    """Make the checks."""
    with ExitStack() as held:
        Parallel(report, held).run()
