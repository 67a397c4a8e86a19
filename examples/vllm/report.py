"""The common part of the checks of `make vllm`: report, prompts, and comparison of answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "vllm"
TOKENS = 24  # that are generated for each prompt
LENGTHS = (5, 17, 31, 32, 33, 64, 96, 100, 128, 150, 200, 256, 333, 500, 640, 800, 1000, 1300)
SHARED = (700, 1900)  # lengths of those that begin as the one before them, on to its middle


@dataclass(frozen=True)
class Answer:
    """The end of a request.

    Attributes:
        tokens: that were generated.
        reason: why it ended: "length", "stop" or "error".
        params: for the engine that goes on with it.
    """

    tokens: list[int]
    reason: str | None
    params: dict[str, Any] | None = None


class Report:
    """Says how each check went, as soon as it is known."""

    def __init__(self) -> None:
        self.failed = 0
        self._began = time.perf_counter()

    def say(self, what: str) -> None:
        """Say how far it is."""
        print(f"{time.perf_counter() - self._began:5.0f} s  {what}", flush=True)

    def check(self, name: str, problems: Sequence[str], detail: str = "") -> None:
        """Say how a check went."""
        self.failed += bool(problems)
        self.say(f"{'FAILED' if problems else 'ok    '}  {name}{detail and ': '}{detail}")
        for problem in problems:
            print(f"           {problem}", flush=True)


def connector(role: str, **options: Any) -> dict[str, Any]:
    """Return what a user gives as --kv-transfer-config."""
    return {
        "kv_connector": "KvplanConnector",
        "kv_connector_module_path": "kvplan.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"explain": True, **options},
    }


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """20 prompts of 5 to 1,900 tokens: text of this project; two begin as another one does."""
    pages = ("reference/operations.md", "internals/links.md")
    text = "\n".join((ROOT / "docs" / page).read_text() for page in pages)
    ids: list[int] = Tokenizer.from_file(str(FOLDER / "model/tokenizer.json")).encode(text).ids
    made, at = [], 0
    for length in lengths:
        made.append(ids[at : at + length])
        at += length
    for length in SHARED:
        half = made[-1][: len(made[-1]) // 2]
        made.append(half + ids[at : at + length - len(half)])
        at += length
    return made


def differences(expected: Sequence[Answer], found: Sequence[Answer]) -> list[str]:
    """Return answers that are neither right nor an error."""
    return [
        f"prompt {number}: {pair.tokens} ({pair.reason}), and alone {right.tokens}"
        for number, (right, pair) in enumerate(zip(expected, found, strict=True))
        if pair.tokens != right.tokens and pair.reason != "error"
    ]


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
