"""Digest of a request's inputs, by which both engines compare its KV cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from kvplan.serving import token_digest


class Inputs(Protocol):
    """The fields of vLLM's Request on which its KV cache depends."""

    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    lora_request: Any
    cache_salt: str | None
    mm_features: Sequence[Any]


class UnknownInputError(Exception):
    """An input of a request that this connector does not know: its cache is not transferred."""


CountKeys = Callable[[Any, int], int]
"""Return how many keys vLLM's own prefix cache has for a request, besides its tokens, of the tokens
before a number."""


def digest_of(request: Inputs, num_tokens: int, count_keys: CountKeys | None = None) -> bytes:
    """Return the digest of the first tokens of a prompt, and of all else that vLLM keys on."""
    tokens = request.prompt_token_ids
    if not tokens:
        raise UnknownInputError("a prompt without token ids")
    keys = [*_lora(request), *_features(request, num_tokens), *_salt(request)]
    keys += _embeds(request, num_tokens)
    if count_keys is not None and (found := count_keys(request, num_tokens)) != len(keys):
        raise UnknownInputError(f"vLLM has {found} keys besides its tokens, and kvplan {len(keys)}")
    return token_digest(tokens[:num_tokens], *(part for key in keys for part in key))


def _lora(request: Inputs) -> list[tuple[str, ...]]:
    """The adapter: its path too, as one name may mean other weights in another process."""
    if (lora := request.lora_request) is None:
        return []
    name, path = getattr(lora, "lora_name", None), getattr(lora, "lora_path", None)
    if not isinstance(name, str) or not isinstance(path, str):
        raise UnknownInputError(f"a LoRA adapter {lora!r} without a name or a path")
    return [("lora", name, path)]


def _features(request: Inputs, num_tokens: int) -> list[tuple[str, ...]]:
    """Images and the like, each with its place in the prompt."""
    keys: list[tuple[str, ...]] = []
    for feature in request.mm_features or ():
        place = getattr(feature, "mm_position", None)
        offset, length = getattr(place, "offset", None), getattr(place, "length", None)
        identifier = feature.identifier
        if not (
            isinstance(identifier, str) and isinstance(offset, int) and isinstance(length, int)
        ):
            raise UnknownInputError(f"a feature {identifier!r} at {place!r}")
        if offset < num_tokens:
            keys.append(("mm", identifier, str(offset), str(length)))
    return keys


def _salt(request: Inputs) -> list[tuple[str, ...]]:
    return [("salt", request.cache_salt)] if request.cache_salt else []


def _embeds(request: Inputs, num_tokens: int) -> list[tuple[str, ...]]:
    """Embeddings that stand in place of tokens."""
    if (embeds := request.prompt_embeds) is None:
        return []
    try:
        rows = embeds[:num_tokens].detach().cpu().contiguous()
        nbytes = rows.numel() * rows.element_size()
        content = ctypes.string_at(rows.data_ptr(), nbytes)
        form = f"{rows.dtype} {tuple(rows.shape)}"
    except (AttributeError, TypeError, IndexError) as error:
        raise UnknownInputError(f"prompt_embeds of {type(embeds).__name__}: {error}") from None
    return [("embeds", form, blake2b(content, digest_size=32).hexdigest())]
