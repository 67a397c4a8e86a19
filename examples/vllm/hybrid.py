"""`python -m examples.vllm.hybrid`: pairs of engines with models of other attention than full one.

Of each tiny model (`tiny.py`) what `live_engines` checks of the small one: the same tokens as one
engine alone, fetched, and no other tokens when something is stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from examples.vllm import tiny
from examples.vllm.engine import Engine
from examples.vllm.live_engines import BLOCK, Pair
from examples.vllm.report import FOLDER, Answer, Report, connector, prompts

# Windows beside full attention, and alone; MLA; states beside full attention.
KINDS = ("gemma3", "mistral", "deepseek", "qwen3_next")

# Beside the small ones and the long ones: as the window ends with a block, or a token beside that.
LENGTHS = (5, 17, 31, 33, 63, 64, 65, 94, 95, 96, 97, 100, 127, 128, 150, 256, 319, 500)


class TinyPair(Pair):
    """Both engines have this model."""

    dtype = "float32"

    def __init__(self, report: Report, held: ExitStack, kind: str) -> None:
        self.kind = kind
        super().__init__(report, held)

    def make_prompts(self) -> list[list[int]]:
        """Make prompts of other lengths; the last begins with all of another one.

        A window knows no more of a prompt than its end, so that it has no shorter prefix of it.
        """
        made = prompts(LENGTHS)
        made[-1][: len(made[-2])] = made[-2]
        return made

    def start(
        self, name: str, core: int, role: str, block_size: int = BLOCK, **options: Any
    ) -> Engine:
        engine = Engine(
            f"{self.kind}-{name}",
            FOLDER,
            core,
            connector(role, **options),
            model=str(FOLDER / self.kind),
            block_size=block_size,
            dtype=self.dtype,
        )
        self.held.callback(engine.close)
        return engine

    def checks(self) -> Iterator[Callable[[], None]]:
        yield self.same_tokens
        yield self.nothing_failed
        yield self.prefix_hits
        yield self.nothing_failed
        yield self.stale
        yield self.mixed_up
        yield self.nothing_leaks

    def nothing_failed(self) -> None:
        """Check failures, too: what vLLM counts as fetched may have been computed after all."""
        metrics = self.decode.metrics()
        fetched = metrics.get("vllm:kvplan_requests_fetched", 0.0)
        failed = metrics.get("vllm:kvplan_requests_failed", 0.0)
        problems = [f"{failed:.0f} could not be fetched"] if failed or not fetched else []
        self.report.check("each request was fetched", problems, f"{fetched:.0f} so far")


class SteppedPair(TinyPair):
    """Prompts end with a token that the engine alone has generated, and come one at a time.

    A consumer computes the last token of a prompt by itself; an engine alone computes that token
    with the others, which gives other results in the last bits. A generated token is computed by
    itself by both.
    """

    at_once = 1

    def __init__(self, report: Report, held: ExitStack, kind: str) -> None:
        super().__init__(report, held, kind)
        whole = self.generate(self.prefill, self.prompts, self.tokens + 1)
        self.prompts = [
            [*prompt, item.tokens[0]] for prompt, item in zip(self.prompts, whole, strict=True)
        ]
        self.alone = [Answer(item.tokens[1:], item.reason) for item in whole]

    def computed(self, numbers: Sequence[int]) -> list[Answer]:
        """Return what it generates if the last token of a prompt is computed with the others."""
        return self.generate(
            self.prefill, [self.prompts[number] for number in numbers], self.tokens
        )


class LatentPair(SteppedPair):
    """A model with MLA. Of its prompts the first token is compared.

    On CPUs vLLM 0.32 alone gives other tokens for several prompts at once. Even one at a time
    results differ a little, which may change one token in ten. It has no prefix cache.
    """

    tokens = 1

    def checks(self) -> Iterator[Callable[[], None]]:
        yield self.same_tokens
        yield self.nothing_failed
        yield self.nothing_leaks

    def right(self, numbers: Sequence[int], found: Sequence[Answer]) -> list[str]:
        problems = super().right(numbers, found)
        return problems if len(problems) > len(numbers) / 10 else []


class StatePair(SteppedPair):
    """A gated delta net beside attention. vLLM's kernels of it for CPUs need bfloat16.

    States have no prefix cache.
    """

    dtype = "bfloat16"

    def checks(self) -> Iterator[Callable[[], None]]:
        yield self.same_tokens
        yield self.nothing_failed
        yield self.stale
        yield self.nothing_leaks


def run(report: Report, *kinds: str) -> None:
    """Make the checks of each model."""
    for kind in kinds or KINDS:
        if not (FOLDER / kind / "config.json").exists():
            tiny.make(FOLDER / kind, kind, FOLDER / "model")
        report.say(f"{kind}:")
        with ExitStack() as held:
            pair = {"deepseek": LatentPair, "qwen3_next": StatePair}.get(kind, TinyPair)
            for check in pair(report, held, kind).checks():
                check()


def main() -> int:
    """Make them alone."""
    parser = argparse.ArgumentParser(prog="python -m examples.vllm.hybrid", description=__doc__)
    parser.add_argument("kind", nargs="*", help=f"of {', '.join(KINDS)}; all, if none is given")
    report = Report()
    run(report, *parser.parse_args().kind)
    report.say(f"{report.failed} failed" if report.failed else "all is well")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
