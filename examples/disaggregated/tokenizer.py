"""The model's tokenizer, rebuilt from the metadata of its GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

from .weights import INSTALL, ModelFile, SetupError

_CONTROL = 3  # GGUF's token type of the special tokens, such as <|im_start|>
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Text to token ids and back: byte-level BPE as in GPT-2, except that every digit is a token."""

    def __init__(self, model_file: ModelFile) -> None:
        try:
            from tokenizers import AddedToken, decoders, models, pre_tokenizers
            from tokenizers import Tokenizer as Bpe
        except ImportError as error:
            raise SetupError(f"cannot build the tokenizer ({error}): run  {INSTALL}") from None
        dialect = model_file.metadata("tokenizer.ggml.pre")
        if dialect != "smollm":
            raise SetupError(f"the model's pre-tokenizer is {dialect!r}; this example knows 'smollm'")
        tokens: list[str] = model_file.metadata("tokenizer.ggml.tokens")
        types: list[int] = model_file.metadata("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in model_file.metadata("tokenizer.ggml.merges")]
        self._bpe = Bpe(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        self._bpe.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind == _CONTROL
            ]
        )
        self.end_of_turn: int = model_file.metadata("tokenizer.ggml.eos_token_id")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included: here a wrong one must be seen."""
        text: str = self._bpe.decode(list(ids), skip_special_tokens=False)
        return text

    def chat(self, request: str) -> list[int]:
        """Token ids of a conversation in which the user has asked `request` and the assistant is next."""
        return self.encode(
            f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n"
            f"<|im_start|>user\n{request}<|im_end|>\n"
            f"<|im_start|>assistant\n"
        )
