"""The digest of a request: it covers every input of its KV cache, and only these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan.serving import token_digest
from kvplan.vllm.scheduler import UnknownInputError, digest_of

TOKENS = list(range(100, 170))


class Embeds:
    """An array with the used part of a torch tensor's interface."""

    def __init__(self, array: Any) -> None:
        self.array = np.ascontiguousarray(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __getitem__(self, at: slice) -> Embeds:
        return Embeds(self.array[at])

    def detach(self) -> Embeds:
        return self

    cpu = contiguous = detach

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


def request(**values: Any) -> Any:
    given = {
        "prompt_token_ids": TOKENS,
        "prompt_embeds": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
    }
    return SimpleNamespace(**(given | values))


def image(identifier: str, offset: int, length: int = 8) -> Any:
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place)


def lora(name: str, path: str, number: int = 1) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number)


def ones(*changed: int) -> Embeds:
    array = np.ones((70, 4), np.float32)
    array[list(changed), 0] = 2
    return Embeds(array)


UNLIKE: list[dict[str, Any]] = [
    {},
    {"prompt_token_ids": TOKENS[::-1]},
    {"cache_salt": "salt"},
    {"cache_salt": "lora"},
    {"lora_request": lora("a", "/adapters/1")},
    {"lora_request": lora("a", "/adapters/2")},
    {"lora_request": lora("b", "/adapters/1")},
    {"mm_features": [image("x", 3)]},
    {"mm_features": [image("y", 3)]},
    {"mm_features": [image("x", 4)]},
    {"mm_features": [image("x", 3, 9)]},
    {"mm_features": [image("x", 3), image("y", 20)]},
    {"mm_features": [image("y", 3), image("x", 20)]},
    {"prompt_embeds": ones()},
    {"prompt_embeds": ones(40)},
    {"prompt_embeds": Embeds(np.ones((70, 4), np.float16))},
    {"prompt_embeds": Embeds(np.ones((70, 8), np.float16))},
]


def test_every_input_of_the_cache_changes_the_digest() -> None:
    digests = {digest_of(request(**values), 60) for values in UNLIKE}
    assert len(digests) == len(UNLIKE)
    assert digest_of(request(), 60) == token_digest(TOKENS[:60])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lora_request": lora("a", "/p", 1)}, {"lora_request": lora("a", "/p", 2)}),
        ({"mm_features": [image("x", 3), image("y", 60)]}, {"mm_features": [image("x", 3)]}),
        ({"prompt_embeds": ones()}, {"prompt_embeds": ones(60, 69)}),
        ({"cache_salt": ""}, {}),
    ],
    ids=["number of an adapter in a process", "image behind", "embeds behind", "empty salt"],
)
def test_other_inputs_do_not_change_the_digest(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest_of(request(**one), 60) == digest_of(request(**other), 60)


@pytest.mark.parametrize(
    "values",
    [
        {"prompt_token_ids": None},
        {"prompt_embeds": "no tensor"},
        {"lora_request": SimpleNamespace(lora_name="a")},
        {"mm_features": [SimpleNamespace(identifier="x")]},
        {"mm_features": [image(None, 3)]},  # type: ignore[arg-type]
    ],
)
def test_unreadable_inputs_have_no_digest(values: dict[str, Any]) -> None:
    with pytest.raises(UnknownInputError):
        digest_of(request(**values), 60)


def test_inputs_that_only_vllm_uses_as_keys_have_no_digest() -> None:
    values = {"cache_salt": "salt", "lora_request": lora("a", "/p")}
    assert digest_of(request(**values), 60, lambda request, num_tokens: 2)
    with pytest.raises(UnknownInputError, match="vLLM has 3 keys besides its tokens; kvplan has 2"):
        digest_of(request(**values), 60, lambda request, num_tokens: 3)


@pytest.mark.parametrize("position", [0, 1, 29, 30, 31, 69])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_only_inputs_that_begin_in_the_prefix_change_the_digest(position: int, length: int) -> None:
    """Tokens before the end of the prefix read an image that crosses the end."""
    tokens = [*TOKENS]
    tokens[position] += 1
    for values in (
        {"prompt_token_ids": tokens},
        {"mm_features": [image("other", position, length)]},
        {"prompt_embeds": ones(position)},
    ):
        usual = {"mm_features": [image("x", position, length)], "prompt_embeds": ones()}
        digests = {digest_of(request(**value), 30) for value in (usual, usual | values)}
        assert len(digests) == (2 if position < 30 else 1), values
