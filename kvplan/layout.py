"""The meaning of the axes of a cache's tensors, and the part of the model that a cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvplan.status import invalid
from kvplan.validation import UINT32_MAX, as_int, check_type, check_width, shown

AXES = {
    "block": "blocks of a paged cache",
    "slot": "batch slots of a contiguous cache",
    "token": "tokens of a block or slot",
    "layer": "layers of the model",
    "kv": "keys and values",
    "head": "KV heads",
    "dim": "elements of a head, or of a latent (MLA)",
    "group": "quantization groups of a scale",
    "state": "state of a request that has no tokens (Mamba)",
}
"""Axes by name. Transfers select blocks, slots and tokens; the other axes belong to the model."""

ROW_AXES = ("block", "slot")

_NAMED = {"NHD": "block token head dim", "HND": "block head token dim"}
# vLLM's letters: L layer, B block, H head, N token, C channels, of which keys are the first half.
_LETTERS = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "kv dim"}
_VLLM = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

OPAQUE = "opaque "
"""Prefix of a kv_tensor_format that kvplan does not know: only compared with the other side."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The axes of one tensor in the order of memory, outermost first.

    The text has names separated by spaces, such as "block token head dim", or is a known name: NHD,
    HND, or letters of vLLM, such as LBHNC. If L comes first, a tensor holds one layer.

    Attributes:
        axes: the names, outermost first; given as one text.

    Raises:
        TypeError: axes that are not text.
        LLMException: LLM_PARAM_INVALID: an unknown axis, an axis named twice, or not exactly one of
            `block` and `slot`, and one of `token` and `state`.
    """

    axes: tuple[str, ...]

    def __init__(self, axes: str) -> None:
        object.__setattr__(self, "axes", _axes_of("axes", check_type("axes", axes, str)))

    @property
    def row_axis(self) -> int:
        """Index of `block` or `slot`."""
        return next(i for i, name in enumerate(self.axes) if name in ROW_AXES)

    def __str__(self) -> str:
        return " ".join(self.axes)

    def __repr__(self) -> str:
        return f"CacheLayout({str(self)!r})"


def _axes_of(argument: str, text: str) -> tuple[str, ...]:
    """Return the names of the axes in a text."""
    given = f"{argument}={shown(text)}"
    if text in _NAMED:
        names = tuple(_NAMED[text].split())
    elif text in _VLLM:
        names = tuple(" ".join(_LETTERS[letter] for letter in text.removeprefix("L")).split())
    else:
        names = tuple(text.split())
    for name in names:
        if name not in AXES:
            if len(names) == 1:
                raise invalid(f"{given} is not a layout; {_nearest(text)}")
            near = get_close_matches(name, AXES, 1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise invalid(
                f"{given}: {shown(name)} is not an axis; known are {', '.join(AXES)}{guess}"
            )
    if len(set(names)) < len(names):
        raise invalid(f"{given} names an axis twice")
    if sum(name in ROW_AXES for name in names) != 1:
        raise invalid(f"{given} must name exactly one of block and slot")
    if ("token" in names) is ("state" in names):
        raise invalid(f"{given} must name either token or state")
    return names


def _nearest(text: str) -> str:
    """Return the remedy for a word that is not a layout, with the names that resemble it most."""
    near = get_close_matches(text.upper(), (*_NAMED, *_VLLM), 2)
    nearest = f"the nearest are {' and '.join(near)}" if near else f"known are {', '.join(_NAMED)}"
    return (
        f"{nearest}; name the axes, as in 'block token head dim', or write {OPAQUE!r} before a "
        "name that is only compared"
    )


@lru_cache(maxsize=256)
def layout_of(kv_tensor_format: str | None, rank: int) -> CacheLayout | None:
    """Return the layout that a `kv_tensor_format` names for a tensor of `rank` dimensions.

    None: the text is None or begins with `OPAQUE`; rows are opaque then.
    """
    if kv_tensor_format is None or kv_tensor_format.startswith(OPAQUE):
        return None
    layout = CacheLayout(" ".join(_axes_of("kv_tensor_format", kv_tensor_format)))
    if kv_tensor_format in _VLLM and len(layout.axes) + 1 == rank:
        layout = CacheLayout(f"layer {layout}")
    if len(layout.axes) != rank:
        raise invalid(
            f"kv_tensor_format={shown(kv_tensor_format)} names {len(layout.axes)} axes; the shape "
            f"has {rank}"
        )
    return layout


Layers = range | tuple[int, ...]
"""Ascending numbers of layers of the model; a range if they are consecutive."""


@dataclass(frozen=True, slots=True)
class Interleaved:
    """The tokens of one rank of context parallelism: every `ranks`-th run of `size` tokens.

    Token `t` of a request belongs to rank `t // size % ranks`; `size` is vLLM's and vllm-ascend's
    `cp_kv_cache_interleave_size`. If prefill and decode context parallelism both share out tokens,
    `ranks` is the product of both sizes, and `rank` is `pcp_rank * dcp_size + dcp_rank`.

    Args:
        rank: the rank that has the tokens.
        ranks: ranks that share each request.
        size: tokens that follow each other on one rank.

    Raises:
        TypeError: a number that is not an int.
        LLMException: LLM_PARAM_INVALID: a number out of its range, or a period of `ranks * size`
            tokens that is not below 2**32.
    """

    rank: int
    ranks: int
    size: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "size", "rank"):
            number = as_int(name, getattr(self, name))
            object.__setattr__(self, name, number)
            stop = self.ranks if name == "rank" else 2**32
            first = 0 if name == "rank" else 1
            if not first <= number < stop:
                raise invalid(f"{name}={number} is out of range [{first}, {stop})")
        if self.ranks * self.size > UINT32_MAX:
            raise invalid(f"ranks={self.ranks} times size={self.size} is out of range [1, 2**32)")

    def __str__(self) -> str:
        """Return the tokens as text, such as `tokens 16..31 of every 32`."""
        own = range(self.rank * self.size, (self.rank + 1) * self.size)
        return f"token{'s' * (self.size > 1)} {numbers_text(own)} of every {self.ranks * self.size}"


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model that a cache holds: layers, KV heads and tokens of each request.

    They are shared out by pipeline, tensor and context parallelism.

    Args:
        layers: layers of the model, ascending: a range, or a sequence of numbers with gaps, such as
            `[0, 6, 12]` of a hybrid model; None: all of `num_layers`.
        heads: consecutive KV heads of the model, ascending; None: all of `num_heads`.
        num_layers: layers of the model; None: unknown, allowed only if `layers` is None.
        num_heads: KV heads of the model; None: unknown, allowed only if `heads` is None.
        tokens: tokens of each request, counted from its first token: every n-th run
            (`Interleaved`), or a range. None: all. A block table has only these tokens, one after
            another. `Interleaved(0, 1)` has all tokens, and becomes None.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: `num_layers` or `num_heads` outside uint32.
        LLMException: LLM_PARAM_INVALID: no number, numbers that do not ascend or are outside the
            model, heads or tokens with gaps, or numbers without the total of the model.
    """

    layers: Layers | None = None
    heads: range | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    tokens: Interleaved | range | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            layers: Sequence[int] | None = None,
            heads: Sequence[int] | None = None,
            num_layers: int | None = None,
            num_heads: int | None = None,
            tokens: Interleaved | range | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, total_name in (("layers", "num_layers"), ("heads", "num_heads")):
            part, total = getattr(self, name), getattr(self, total_name)
            if total is not None:
                total = as_int(total_name, total)
                check_width(total_name, total, 0, UINT32_MAX)
                if total == 0:
                    raise invalid(f"{total_name}=0 is out of range [1, 2**32)")
                object.__setattr__(self, total_name, total)
            if part is None:
                if total is not None:
                    object.__setattr__(self, name, range(total))
                continue
            numbers = _numbers(name, part)
            if total is None:
                raise invalid(f"{name}={shown(part)} needs {total_name}, the total of the model")
            if not numbers or numbers[0] < 0 or numbers[-1] >= total:
                raise invalid(f"{name}={shown(part)} must be one or more of [0, {total})")
            if name == "heads" and not isinstance(numbers, range):
                raise invalid(f"heads={shown(part)} must be consecutive, as a range of step 1")
            object.__setattr__(self, name, numbers)
        self._check_tokens()

    def _check_tokens(self) -> None:
        tokens = self.tokens
        if isinstance(tokens, range):
            if tokens.step != 1 or not 0 <= tokens.start < tokens.stop <= UINT32_MAX:
                raise invalid(
                    f"tokens={tokens} must be one or more of [0, {UINT32_MAX}), in a range of step "
                    "1; give Interleaved for every n-th"
                )
        elif tokens is not None and not isinstance(tokens, Interleaved):
            raise TypeError(
                f"tokens={shown(tokens)} must be Interleaved, a range or None, not "
                f"{type(tokens).__name__}"
            )
        elif tokens is not None and tokens.ranks == 1:
            object.__setattr__(self, "tokens", None)

    def __str__(self) -> str:
        words = []
        for name, part, total in (
            ("layer", self.layers, self.num_layers),
            ("head", self.heads, self.num_heads),
        ):
            if part is None or total is None:
                continue
            if len(part) == total:
                words.append(f"all {total} {name}s")
            else:
                words.append(f"{name}{'s' * (len(part) > 1)} {numbers_text(part)} of {total}")
        if isinstance(self.tokens, range):
            words.append(f"token{'s' * (len(self.tokens) > 1)} {numbers_text(self.tokens)}")
        elif self.tokens is not None:
            words.append(str(self.tokens))
        return ", ".join(words) or "whole"


def check_shard(
    shard: Shard,
    num_tensors: int,
    shape: tuple[int, ...],
    layout: CacheLayout | None,
    kv_tensor_format: str | None,
) -> None:
    """Refuse a shard that tensors of one shape and layout cannot hold.

    `kv_tensor_format` is the layout as the user gave it, for messages.
    """
    axes = () if layout is None else layout.axes
    if shard.heads is not None:
        if "head" not in axes:
            raise invalid(
                f"shard has heads {shard.heads}, but kv_tensor_format={shown(kv_tensor_format)} "
                "names no axis head"
            )
        if len(shard.heads) != (heads := shape[axes.index("head")]):
            raise invalid(
                f"shard has {len(shard.heads)} heads {shard.heads}, but the axis head of "
                f"shape={shape} has {heads}"
            )
    if shard.tokens is not None and "token" not in axes:
        raise invalid(
            f"shard has {shard}, but kv_tensor_format={shown(kv_tensor_format)} names no axis token"
        )
    if shard.layers is not None:
        inside = shape[axes.index("layer")] if "layer" in axes else 1
        if num_tensors * inside % len(shard.layers):
            raise invalid(
                f"shard has {len(shard.layers)} layers {shard.layers}, which do not divide "
                f"num_tensors={num_tensors}" + (f" of {inside} layers each" if inside > 1 else "")
            )


def _numbers(name: str, given: Any) -> Layers:
    """Return ascending numbers; a range if they are consecutive."""
    if isinstance(given, range) and given.step == 1:
        return given
    # An array of no dimension holds one number: it is not a sequence. Some arrays have no shape.
    is_array = hasattr(given, "__array__") and getattr(given, "shape", True) != ()
    if isinstance(given, str | bytes) or not (isinstance(given, Sequence) or is_array):
        raise TypeError(
            f"{name}={shown(given)} must be a range or a sequence of int, not "
            f"{type(given).__name__}"
        )
    numbers = tuple([as_int(f"{name}[{i}]", number) for i, number in enumerate(given)])
    if any(b <= a for a, b in pairwise(numbers)):
        raise invalid(f"{name}={shown(given)} must be in strictly ascending order")
    return consecutive(numbers)


def consecutive(numbers: Layers) -> Layers:
    """Return ascending numbers as a range if they are consecutive."""
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        return range(numbers[0], numbers[-1] + 1)
    return numbers


def numbers_text(numbers: Layers) -> str:
    """Return numbers as text: `5`, `5..9` or `0, 6, 12`."""
    if not isinstance(numbers, range):
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}..{numbers[-1]}"
