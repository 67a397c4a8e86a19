"""What the axes of a cache's tensors mean, and which part of the model's cache they hold."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from kvplan.status import invalid
from kvplan.validation import UINT32_MAX, check_type, check_width, shown

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
"""Names of axes. `block` or `slot`, and `token`, address; the others are the model's."""

ROW_AXES = ("block", "slot")

_NAMED = {"NHD": "block token head dim", "HND": "block head token dim"}
# vLLM's letters: L layer, B block, H head, N token, C channels, of which keys are the first half.
_LETTERS = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "kv dim"}
_VLLM = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

OPAQUE = "opaque "
"""Begins a kv_tensor_format that is not a layout: the name of one that kvplan does not know. It is
compared with that of the other side, and not read."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The axes of one tensor as they lie in memory, outermost first.

    Written with spaces between the names, as in `CacheLayout("block token head dim")`, or by a
    known name: NHD, HND, and vLLM's letters (LBHNC and the like, where a tensor holds one layer if
    L comes first).

    Attributes:
        axes: the names, outermost first; given as one text.

    Raises:
        TypeError: axes that are not text.
        LLMException: LLM_PARAM_INVALID: an unknown axis, an axis named twice, or not exactly one of
            `block` and `slot`, or neither `token` nor `state`.
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
    """Return the names of the axes that a text says.

    Raises:
        LLMException: LLM_PARAM_INVALID: as `CacheLayout`; names `argument`.
    """
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
    """The names of layouts that are most like a word that is none."""
    near = get_close_matches(text.upper(), (*_NAMED, *_VLLM), 2)
    nearest = f"the nearest are {' and '.join(near)}" if near else f"known are {', '.join(_NAMED)}"
    return (
        f"{nearest}; name the axes, as in 'block token head dim', or write {OPAQUE!r} before a "
        "name that is only compared"
    )


@lru_cache(maxsize=256)
def layout_of(kv_tensor_format: str | None, rank: int) -> CacheLayout | None:
    """Return the layout that a `kv_tensor_format` names for a tensor of `rank` dimensions.

    None: there is no text, or it begins with `OPAQUE`; rows are opaque then.

    Raises:
        LLMException: LLM_PARAM_INVALID: a text that is not a layout, or has another number of axes.
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


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the model's cache a cache holds: layers (pipeline) and KV heads (tensor).

    Args:
        layers: layers of the model, a range of step 1; None: all of `num_layers`.
        heads: KV heads of the model, a range of step 1; None: all of `num_heads`.
        num_layers: of the model; None: not known, where `layers` is None.
        num_heads: KV heads of the model; None: not known, where `heads` is None.

    Raises:
        TypeError: a field of another type.
        LLMException: LLM_PARAM_INVALID: an empty range, a step other than 1, a range outside of
            the model, or a range without the model's number.
    """

    layers: range | None = None
    heads: range | None = None
    num_layers: int | None = None
    num_heads: int | None = None

    def __post_init__(self) -> None:
        for name, total_name in (("layers", "num_layers"), ("heads", "num_heads")):
            part, total = getattr(self, name), getattr(self, total_name)
            if total is not None:
                check_width(total_name, total, 0, UINT32_MAX)
                if total == 0:
                    raise invalid(f"{total_name}=0 is out of range [1, 2**32)")
            if part is None:
                if total is not None:
                    object.__setattr__(self, name, range(total))
                continue
            check_type(name, part, range)
            if total is None:
                raise invalid(f"{name}={part} needs {total_name}, how many the model has")
            if part.step != 1 or not part or part.start < 0 or part.stop > total:
                raise invalid(f"{name}={part} must be a non-empty range of step 1 in [0, {total})")

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
            elif len(part) == 1:
                words.append(f"{name} {part.start} of {total}")
            else:
                words.append(f"{name}s {part.start}..{part.stop - 1} of {total}")
        return ", ".join(words) or "whole"
