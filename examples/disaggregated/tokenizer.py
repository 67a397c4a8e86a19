"""The model's tokenizer, rebuilt from the metadata of its GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from .requirements import SetupError
from .weights import ModelFile

CONTROL = 3
"""GGUF's type of the special tokens, such as <|im_start|>."""

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Text to token ids and back: byte-level BPE as in GPT-2, but each digit is a token."""

    def __init__(self, model_file: ModelFile) -> None:
        dialect = model_file.metadata("tokenizer.ggml.pre")
        if dialect != "smollm":
            raise SetupError(f"the model's tokenizer splits text as {dialect!r}, not 'smollm'")
        tokens: list[str] = model_file.metadata("tokenizer.ggml.tokens")
        types: list[int] = model_file.metadata("tokenizer.ggml.token_type")
        merges = [m.partition(" ") for m in model_file.metadata("tokenizer.ggml.merges")]
        self.end_of_turn: int = model_file.metadata("tokenizer.ggml.eos_token_id")

        bpe = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in merges],
        )
        self._bpe = tokenizers.Tokenizer(bpe)
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        self._bpe.decoder = decoders.ByteLevel()
        special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        self._bpe.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in special]
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens too, for here a wrong one must be seen."""
        text: str = self._bpe.decode(list(ids), skip_special_tokens=False)
        return text

    def save(self, path: Path) -> None:
        """Write it as other libraries read it (tokenizer.json)."""
        self._bpe.save(str(path))

    def chat(self, request: str) -> list[int]:
        """Token ids of a chat in which the user said `request` and the assistant is next."""
        return self.encode(
            f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
            f"<|im_start|>user\n{request}<|im_end|>\n"
            f"<|im_start|>assistant\n"
        )
