"""A round of requests between engines that prefill and engines that decode.

    python -m tests.soak.requests SEED [REQUESTS]

Two engines of each kind have a process each; `requests_process.py` describes which parts of vLLM
they stand for. Some requests are aborted. Some have parameters that were used before, that belong
to another prompt or to a killed process, or that are invented. Some are pushed while they are
computed, and preempted or abandoned meanwhile. Engines are killed with requests in flight. The seed
decides the actions and their order.

The round exits with 1 if an engine generates from the cache of other tokens, recomputes blocks that
had not failed, or writes to a block after freeing it. It also fails if an engine waits for a killed
peer until a timeout, or still holds a block or a lease when all leases have expired. The last line
is the counts as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.soak.requests_process import TOKENS, Wrong
from tests.support.peer import Peer

REQUESTS = 1000
BLOCKS = {"Prefilling": 400, "Decoding": 240}
MAX_BLOCKS = 60  # per prompt
MAX_IN_FLIGHT = 8
TTL_MS = 2000.0
STALL_S = 15.0
"""Duration that a request reaches only if a timeout ended it.

Timeouts are 30 s and more.
"""
DEADLINE_S = 60.0
OLD = 40  # number of parameters that are kept for a second use


class Process(Peer):
    module = "tests.soak.requests_process"


@dataclass
class PendingRequest:
    """A request whose end the decoding engine has not reported yet."""

    decode: int
    prefill: int
    since: float
    started_s: float  # `Round.started_s` when the request began
    killed: float = 0.0  # when its producer was killed


class Round:
    """The engines, and the outcomes of the requests.

    Args:
        seed: the seed of all random choices.
        held: closes the processes.
    """

    def __init__(self, seed: int, held: ExitStack) -> None:
        self.random = Random(seed)
        self.transport = self.random.choice(["tcp", "local"])
        self.counts: Counter[str] = Counter()
        self.pending: dict[str, PendingRequest] = {}
        self.slowest_s = self.after_kill_s = self.held_s = 0.0
        self.started_s = 0.0  # spent on starting processes, during which no engine makes a step
        self._held = held
        self._number = 0
        self._old: list[tuple[list[int], dict[str, Any]]] = []
        self._listen = ["127.0.0.1:0"] * 2
        # The fields of each producer in the parameters of a transfer.
        self._known: list[dict[str, Any]] = [{}, {}]
        self._prefill = [self._start("Prefilling", index) for index in range(2)]
        self._decode = [self._start("Decoding", index) for index in range(2)]
        self._actions: list[tuple[int, Callable[[int, int], None]]] = [
            (44, self._fetched),
            (10, self._used_again),
            (8, self._of_another_prompt),
            (4, self._made_up),
            (4, self._abandoned),
            (12, self._aborted),
            (13, self._pushed),
            (3, self._prefill_killed),
            (1, self._decode_killed),
        ]

    def _start(self, kind: str, number: int) -> Process:
        self._number += 1
        began = time.monotonic()
        peer = Process()
        self._held.callback(peer.close)
        options: dict[str, Any] = {
            "engine": {"kvplan.transport": self.transport},
            "lease_ttl_ms": TTL_MS,
            "renew_interval_ms": TTL_MS / 6,
        }
        if kind == "Prefilling":
            options["listen"] = self._listen[number]
        peer.run(
            f"engine = {kind}(name, seed, blocks, **options)",
            name=f"{kind} {self._number}",
            seed=self.random.randrange(2**30),
            blocks=BLOCKS[kind],
            options=options,
        )
        if kind == "Prefilling":  # the next producer of this number gets the same address
            self._listen[number] = peer.run("result = engine.address")
            params = peer.run("result = engine.prefill('first', [1] * 32)")["kvplan"]
            wanted = ("protocol", "instance", "sources")
            self._known[number] = {key: params[key] for key in wanted}
        self.started_s += time.monotonic() - began
        return peer

    def run(self, requests: int) -> None:
        """Make the requests, and wait for their end; raise `Wrong` on a violation."""
        weights, actions = zip(*self._actions, strict=True)
        for number in range(requests):
            (action,) = self.random.choices(actions, weights)
            action(self.random.randrange(2), self.random.randrange(2))
            while len(self.pending) > MAX_IN_FLIGHT or (number % 3 == 0 and self._poll()):
                self._poll()
        self._until(lambda: not self.pending, "requests have no result")
        began = time.monotonic()
        self._until(lambda: not self._blocks(), "blocks are held")
        self._until(lambda: not self._leases(), "leases are held")
        self.held_s = time.monotonic() - began

    def _until(self, holds: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not holds():
            if time.monotonic() > end:
                raise Wrong(f"{otherwise} after {DEADLINE_S:g} s: {self.pending} {self._blocks()}")
            self._poll()

    def _blocks(self) -> int:
        mine = [ask(peer, "poll") for peer in self._prefill]
        return sum(mine) + sum(
            BLOCKS["Decoding"] - int(peer.run("result = len(engine.free)")) for peer in self._decode
        )

    def _leases(self) -> int:
        return sum(ask(peer, "leases") for peer in (*self._prefill, *self._decode))

    def _poll(self) -> bool:
        """Let all engines make a step; return True if a request has ended."""
        for peer in self._prefill:
            if not peer.dead:
                ask(peer, "poll")
        ended = [item for peer in self._decode for item in ask(peer, "poll")]
        for name, how, when in ended:
            pending = self.pending.pop(name)
            self.counts[how] += 1
            took = when - pending.since - (self.started_s - pending.started_s)
            self.slowest_s = max(self.slowest_s, took)
            if pending.killed:
                self.counts["in flight when its producer was killed"] += 1
                self.after_kill_s = max(self.after_kill_s, when - pending.killed)
            if took > STALL_S:
                raise Wrong(f"{name} took {took:.1f} s, and was {how}")
        return bool(ended)

    def _prompt(self) -> list[int]:
        """Return a prompt of any length; some begin with an earlier one."""
        tokens = self.random.randint(1, MAX_BLOCKS * TOKENS)
        tokens_of_prompt = [self.random.randrange(50_000) for _ in range(tokens)]
        if self._old and self.random.random() < 0.2:
            known, _ = self.random.choice(self._old)
            tokens_of_prompt[: len(known)] = known
        return tokens_of_prompt[: MAX_BLOCKS * TOKENS]

    def _prefilled(self, prefill: int, prompt: list[int]) -> dict[str, Any]:
        self._number += 1
        found: list[dict[str, Any]] = []

        def has_room() -> bool:
            params = ask(self._prefill[prefill], "prefill", f"p{self._number}", prompt)
            found.extend([params] if params else [])
            return bool(params)

        self._until(has_room, "a producer has no room")
        self._old = [*self._old[-OLD:], (prompt, found[0])]
        return found[0]

    def _submit(self, decode: int, prefill: int, prompt: list[int], params: dict[str, Any]) -> str:
        self._number += 1
        name = f"d{self._number}"
        hits = self.random.choice([0, 0, self.random.randint(0, len(prompt) // TOKENS)])
        self.pending[name] = PendingRequest(decode, prefill, time.monotonic(), self.started_s)
        ask(self._decode[decode], "submit", name, prompt, params, hits)
        return name

    # The actions that `run` chooses from.

    def _fetched(self, decode: int, prefill: int) -> None:
        prompt = self._prompt()
        self._submit(decode, prefill, prompt, self._prefilled(prefill, prompt))

    def _used_again(self, decode: int, prefill: int) -> None:
        """Submit a request with parameters that were used before, or whose process was killed."""
        if self._old:
            self._submit(decode, prefill, *self.random.choice(self._old))

    def _of_another_prompt(self, decode: int, prefill: int) -> None:
        params = self._prefilled(prefill, self._prompt())
        self._submit(decode, prefill, self._prompt(), params)

    def _made_up(self, decode: int, prefill: int) -> None:
        prompt = self._prompt()
        params = self._prefilled(prefill, prompt)
        changed = self.random.choice(
            [{"handle": f"{self.random.getrandbits(128):032x}"}, {"protocol": 99}, {"sources": []}]
        )
        self._submit(decode, prefill, prompt, params | {"kvplan": params["kvplan"] | changed})

    def _abandoned(self, decode: int, prefill: int) -> None:
        self._prefilled(prefill, self._prompt())
        self.counts["never fetched"] += 1

    def _aborted(self, decode: int, prefill: int) -> None:
        prompt = self._prompt()
        name = self._submit(decode, prefill, prompt, self._prefilled(prefill, prompt))
        for _ in range(self.random.randrange(3)):
            self._poll()
        if name in self.pending:
            ask(self._decode[decode], "abort", name)

    def _pushed(self, decode: int, prefill: int) -> None:
        """Push a request while it is computed; it may be preempted, abandoned or killed."""
        self._number += 1
        peer, name, prompt = self._prefill[prefill], f"p{self._number}", self._prompt()
        fate = self.random.choice(["ends", "ends", "ends", "preempted", "given up", "killed"])
        self._until(lambda: ask(peer, "begin", name, prompt, name), "a producer has no room")
        known = self._known[prefill] | {"transfer": name}
        self._submit(decode, prefill, prompt, {"do_remote_prefill": True, "kvplan": known})
        for _ in range(self.random.randrange(3)):
            self._poll()
        is_whole = ask(peer, "chunk")
        if fate == "preempted" and ask(peer, "preempt") is None:
            is_whole = False
        while not is_whole and fate in ("ends", "preempted"):
            is_whole = ask(peer, "chunk")
        if fate == "killed":
            if not is_whole:
                ask(peer, "chunk", 1)  # the producer dies between two layers
            self._kill(prefill)
        else:
            status = "FINISHED_ABORTED" if fate == "given up" else "FINISHED_LENGTH_CAPPED"
            ask(peer, "end", status)
        self.counts[f"pushed, {fate}"] += 1

    def _prefill_killed(self, decode: int, prefill: int) -> None:
        for _ in range(self.random.randint(1, 4)):
            self._fetched(self.random.randrange(2), prefill)
        if self.random.random() < 0.7:
            self._poll()
        self._kill(prefill)

    def _kill(self, prefill: int) -> None:
        self._prefill[prefill].kill()
        self.counts["producers killed"] += 1
        self._prefill[prefill].close()
        if self.random.random() < 0.7:  # otherwise another producer takes over its address at once
            orphans = [request for request in self.pending.values() if request.prefill == prefill]
            for orphan in orphans:
                orphan.killed = time.monotonic()
            self._until(
                lambda: not [orphan for orphan in orphans if orphan in self.pending.values()],
                "they wait",
            )
        self._prefill[prefill] = self._start("Prefilling", prefill)

    def _decode_killed(self, decode: int, prefill: int) -> None:
        for _ in range(self.random.randint(1, 4)):
            self._fetched(decode, self.random.randrange(2))
        if self.random.random() < 0.7:
            self._poll()
        self._decode[decode].kill()
        self._decode[decode].close()
        self.counts["consumers killed"] += 1
        lost = [name for name, request in self.pending.items() if request.decode == decode]
        self.counts["lost with their consumer"] += len(lost)
        for name in lost:
            del self.pending[name]
        self._decode[decode] = self._start("Decoding", decode)


def ask(peer: Process, method: str, *arguments: Any) -> Any:
    """Call a method of an engine."""
    return peer.run(
        "result = getattr(engine, method)(*arguments)", method=method, arguments=arguments
    )


def one_round(seed: int, requests: int) -> dict[str, Any]:
    """Run a round, and return its counts; raise `Wrong` on a violation."""
    with ExitStack() as held:
        whole = Round(seed, held)
        whole.run(requests)
        counts = whole.counts | Counter({f"requests over {whole.transport}": requests})
        return {
            "counts": dict(counts),
            "slowest_s": round(whole.slowest_s, 3),
            "slowest_after_a_kill_s": round(whole.after_kill_s, 3),
            "until_no_block_is_held_s": round(whole.held_s, 3),
        }


def main() -> None:
    seed = int(sys.argv[1])
    requests = int(sys.argv[2]) if len(sys.argv) > 2 else REQUESTS
    print(json.dumps(one_round(seed, requests)))


if __name__ == "__main__":
    main()
