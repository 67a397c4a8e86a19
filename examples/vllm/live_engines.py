"""Two offline engines: what moves, and faults that must bring no other tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from examples.vllm.engine import Engine
from examples.vllm.report import (
    FOLDER,
    TOKENS,
    Answer,
    Report,
    connector,
    differences,
    free_port,
    prompts,
)

FINISH = {"do_remote_decode": True}
BLOCK = 32  # tokens


def leaks(*engines: Engine) -> list[str]:
    """Return engines that still hold blocks of their caches though all requests have ended."""
    found = []
    for engine in engines:
        usage = 1.0
        end = time.monotonic() + 60  # what a consumer has fetched is free a step later
        while usage and time.monotonic() < end:
            engine.generate([[1, 2, 3]], 1)
            usage = engine.metrics()["vllm:kv_cache_usage_perc"]
        if usage:
            found.append(f"{engine.name} still uses {usage:.1%} of its blocks")
    return found


class Pair:
    """The checks, in the order in which they are made."""

    at_once = 100  # prompts
    tokens = TOKENS  # that are generated for each

    def __init__(self, report: Report, held: ExitStack) -> None:
        self.report, self.held = report, held
        self.prompts = self.make_prompts()
        self.listen = f"127.0.0.1:{free_port()}"
        self.prefill = self.start(
            "prefill", 0, "kv_producer", listen=self.listen, lease_ttl_ms=25_000
        )
        self.decode = self.start("decode", 1, "kv_consumer", renew_interval_ms=2_000)
        self.prefill.started()
        self.decode.started()
        report.say("two engines are up")
        self.alone = self.generate(self.prefill, self.prompts, self.tokens)
        self.prefill.forget()
        report.say(f"one engine alone has answered {len(self.prompts)} prompts")

    def make_prompts(self) -> list[list[int]]:
        return prompts()

    def start(
        self, name: str, core: int, role: str, block_size: int = BLOCK, **options: Any
    ) -> Engine:
        engine = Engine(name, FOLDER, core, connector(role, **options), block_size=block_size)
        self.held.callback(engine.close)
        return engine

    def checks(self) -> Iterator[Callable[[], None]]:
        yield self.same_tokens
        yield self.prefix_hits
        yield self.stale
        yield self.mixed_up
        yield self.malformed
        yield self.nothing_leaks
        yield self.killed
        yield self.restarted

    def finished(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Let the prefill engine compute prompts; returns what travels with them."""
        given = [self.prompts[number] for number in numbers]
        answers = self.generate(self.prefill, given, 1, [FINISH] * len(given))
        return [answer.params or {} for answer in answers]

    def decoded(self, numbers: Sequence[int], params: Sequence[dict[str, Any]]) -> list[Answer]:
        return self.generate(
            self.decode, [self.prompts[number] for number in numbers], self.tokens, params
        )

    def generate(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        params: Sequence[dict[str, Any]] = (),
    ) -> list[Answer]:
        answers: list[Answer] = []
        for at in range(0, len(prompts), self.at_once):
            some = slice(at, at + self.at_once)
            answers += engine.generate(prompts[some], tokens, params[some] or None)
        return answers

    def right(self, numbers: Sequence[int], found: Sequence[Answer]) -> list[str]:
        return differences([self.alone[number] for number in numbers], found)

    def computed(self, numbers: Sequence[int]) -> list[Answer]:
        """Return what one engine alone generates if it computes a prompt at once."""
        return [self.alone[number] for number in numbers]

    def fetched(self) -> float:
        """Return the tokens that were fetched so far; vLLM's own count has failures, too."""
        return self.decode.metrics()["vllm:kvplan_tokens_fetched"]

    def same_tokens(self) -> None:
        numbers = range(len(self.prompts))
        before = self.fetched()
        problems = self.right(numbers, self.decoded(numbers, self.finished(numbers)))
        fetched = self.fetched() - before
        total = sum(map(len, self.prompts))
        if fetched < total / 2:
            problems.append(f"only {fetched:.0f} of {total} tokens were fetched")
        self.report.check(
            "tokens are those of one engine alone",
            problems,
            f"{len(numbers)} prompts, {fetched:.0f} of {total} tokens fetched",
        )

    def prefix_hits(self) -> None:
        self.decode.forget()
        first, second = len(self.prompts) - 2, len(self.prompts) - 1
        problems = self.right([first], self.decoded([first], self.finished([first])))
        before = self.fetched()
        problems += self.right([second], self.decoded([second], self.finished([second])))
        fetched, whole = self.fetched() - before, len(self.prompts[second])
        if not 0 < fetched <= whole - BLOCK:  # a block at least was here
            problems.append(f"{fetched:.0f} of {whole} tokens were fetched")
        self.report.check(
            "only what the prefix cache lacks moves",
            problems,
            f"{fetched:.0f} of {whole} tokens",
        )

    def stale(self) -> None:
        """Use parameters again when their blocks are another request's."""
        numbers = [13, 14, 15]
        self.decode.forget()
        params = self.finished(numbers)
        problems = self.right(numbers, self.decoded(numbers, params))
        self.prefill.forget()
        others = [16, 17, 18]
        self.prefill.generate([self.prompts[other] for other in others], 1)  # in these blocks now
        self.decode.forget()
        problems += differences(self.computed(numbers), self.decoded(numbers, params))
        self.report.check("stale parameters bring no other tokens", problems)

    def mixed_up(self) -> None:
        """Give each request the parameters of another."""
        numbers = [9, 10, 11, 12]
        self.decode.forget()
        params = self.finished(numbers)
        problems = self.right(numbers, self.decoded(numbers, params[1:] + params[:1]))
        problems += self.right(numbers, self.decoded(numbers, params))
        self.report.check("parameters of other requests bring no other tokens", problems)

    def malformed(self) -> None:
        """Give parameters that no producer has made."""
        self.decode.forget()
        (params,) = self.finished([10])
        whole = params["kvplan"]
        changed = [
            {**whole, "handle": "00" * 16},
            {**whole, "digest": "00" * 16},
            {**whole, "sources": [[1, "127.0.0.1:1"]]},
            {**whole, "num_tokens": 10**6},
            {"protocol": 99},
        ]
        numbers = [10] * len(changed)
        found = self.decoded(numbers, [{**params, "kvplan": item} for item in changed])
        problems = self.right(numbers, found)
        problems += self.right([10], self.decoded([10], [json.loads(json.dumps(params))]))
        self.report.check("parameters that no producer has made bring no other tokens", problems)

    def nothing_leaks(self) -> None:
        self.report.check("no block is held when all has ended", leaks(self.prefill, self.decode))

    def killed(self) -> None:
        numbers = list(range(6, 18))
        self.decode.forget()
        params = self.finished(numbers)
        self.decode.begin([self.prompts[number] for number in numbers], TOKENS, params)
        self.prefill.kill()
        problems = self.right(numbers, self.decode.ended())
        self.decode.forget()
        problems += self.right(numbers, self.decoded(numbers, params))
        self.report.check("a prefill engine that is killed brings no other tokens", problems)

    def restarted(self) -> None:
        """At the same address; then one whose blocks are of another order, which is refused."""
        numbers = range(6, 16)
        for block, fits in ((BLOCK, True), (2 * BLOCK, False)):
            if not fits:
                self.prefill.kill()
            self.prefill = self.start(
                f"prefill-{block}", 0, "kv_producer", block, listen=self.listen
            )
            self.prefill.started()
            self.decode.forget()
            before = self.fetched()
            problems = self.right(numbers, self.decoded(numbers, self.finished(numbers)))
            fetched = self.fetched() - before
            if bool(fetched) != fits:
                problems.append(f"{fetched:.0f} tokens were fetched")
            what = "is fetched from" if fits else "is refused, as blocks differ"
            self.report.check(
                f"another prefill engine at the same address, of blocks of {block} tokens, {what}",
                problems + leaks(self.prefill, self.decode),
                f"{fetched:.0f} tokens fetched",
            )


def run(report: Report) -> None:
    """Make the checks."""
    with ExitStack() as held:
        for check in Pair(report, held).checks():
            check()
