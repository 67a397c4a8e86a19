"""The two halves of inference: prefill reads the prompt, decode adds one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .model import Llama
from .paged_cache import BlockTable, PagedCache
from .tokenizer import Tokenizer

CHUNK = 128
"""Prompt tokens of one forward pass: bounds memory, and shows that something happens."""


def read_prompt(path: Path, tokenizer: Tokenizer, room: int) -> list[int]:
    """Token ids of the request in a text file.

    Raises:
        ValueError: it has more than `room` tokens.
    """
    prompt = tokenizer.chat(path.read_text(encoding="utf-8").strip())
    if len(prompt) > room:
        raise ValueError(
            f"{path.name} has {len(prompt)} tokens; the model's context leaves room for {room}"
        )
    return prompt


def prefill(
    model: Llama,
    prompt: Sequence[int],
    cache: PagedCache,
    block_table: BlockTable,
    progress: Callable[[str], None],
    begin: Callable[[int], Callable[[int], None]] = lambda end: lambda layer: None,
) -> int:
    """Fill `cache` with the keys and values of `prompt`; return the first generated token.

    `begin` is called before each chunk, with its end; what it returns, with each layer of the chunk
    whose keys and values are in the cache.
    """
    first_token = -1
    for start in range(0, len(prompt), CHUNK):
        chunk = prompt[start : start + CHUNK]
        written = begin(start + len(chunk))
        first_token = int(model.forward(chunk, start, cache, block_table, written).argmax())
        progress(f"prompt: {start + len(chunk)} of {len(prompt)} tokens")
    return first_token


def decode(
    model: Llama,
    tokenizer: Tokenizer,
    cache: PagedCache,
    block_table: BlockTable,
    num_cached: int,
    first_token: int,
    max_tokens: int,
    show: Callable[[str], None],
) -> list[int]:
    """Generate greedily, from a cache of `num_cached` tokens, until the turn ends.

    Returns the token ids, `first_token` included, at most `max_tokens`. `show` is given the text
    as it grows, piece by piece.
    """
    ids = [first_token]
    shown = ""
    while True:
        text = tokenizer.decode(ids)
        # A character may take several tokens; until the last of them it reads as U+FFFD.
        if not text.endswith("\ufffd"):
            show(text[len(shown) :])
            shown = text
        if len(ids) >= max_tokens or ids[-1] == tokenizer.end_of_turn:
            return ids
        position = num_cached + len(ids) - 1
        ids.append(int(model.forward(ids[-1:], position, cache, block_table).argmax()))
