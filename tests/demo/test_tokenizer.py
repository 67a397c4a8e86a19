"""Tests of the example's tokenizer with the real vocabulary."""

import pytest

from examples.disaggregated.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog.",
        "  leading, trailing and  double spaces  \n\n\ttabs",
        "It's 1822, they'd said; we'll see 3.14159 of 1,000,000!",
        "naïve café, größer, 日本語, привет, 🙂🏳️‍🌈, \u0000\u007f",
        "def f(x):\n    return x**2  # <tag> {brace}",
    ],
)
def test_text_is_decoded_as_it_was_encoded(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("18225")] == list("18225")


def test_words_are_tokens_with_their_space(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("Sailors didn't burn the wood?")]
    assert pieces == ["S", "ail", "ors", " didn", "'t", " burn", " the", " wood", "?"]
    assert tokenizer.encode("Hello, how are you today?") == [19556, 28, 638, 359, 346, 1834, 47]


def test_a_chat_is_framed_by_special_tokens(tokenizer: Tokenizer) -> None:
    start, end = tokenizer.encode("<|im_start|><|im_end|>")
    assert (start, end) == (1, tokenizer.end_of_turn)
    ids = tokenizer.chat("What is a block table?")
    assert ids[0] == start
    assert (ids.count(start), ids.count(end)) == (3, 2)
    assert tokenizer.decode(ids).endswith(
        "<|im_start|>user\nWhat is a block table?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_special_token_inside_text_is_one_token(tokenizer: Tokenizer) -> None:
    """A special token in the middle of text is one token and does not join its neighbours."""
    ids = tokenizer.encode("a<|im_end|>b")
    assert ids == [*tokenizer.encode("a"), tokenizer.end_of_turn, *tokenizer.encode("b")]
