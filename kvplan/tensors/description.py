"""Cache descriptions of tensors, and the comparison of tensors with a description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplan.layout import CacheLayout, Shard
from kvplan.status import invalid
from kvplan.tensors.form import TensorForm, array_form, read_form
from kvplan.types import CacheDesc, DataType, Placement
from kvplan.validation import check_type, shown

_PLURALS = {"kv": "keys and values", "dim": "elements"}


def check_contiguous(form: TensorForm) -> None:
    """Refuse a tensor that is empty, not in host memory, or not C-contiguous."""
    check_host(form)
    _check_dense(form)


def _check_dense(form: TensorForm) -> None:
    """Refuse a tensor that is not C-contiguous; name a permutation that is, if one exists."""
    if form.is_contiguous:
        return
    remedy = "contiguous memory is needed, such as a copy of it"
    if form.gap(-1) is None:
        axes = ", ".join(map(str, form.order))
        remedy = (
            f"permuted by ({axes}) it is, with shape {form.memory_shape}: give that view (NumPy's "
            "transpose, torch's permute), and a cache_desc of that shape"
        )
    raise invalid(
        f"{form.name} of shape {form.shape} and strides {form.strides} (in elements) is not "
        f"C-contiguous; {remedy}"
    )


def check_host(form: TensorForm, why: str = "") -> None:
    """Refuse a tensor that is empty, or not in host memory: LLM_PARAM_INVALID.

    `why` ends the message about a tensor on a device.
    """
    if form.device is not None:
        raise invalid(f"{form.name} is on {form.device.text}; it must be in host memory{why}")
    check_present(form)


def check_present(form: TensorForm) -> None:
    """Refuse a tensor that has no bytes or no memory: LLM_PARAM_INVALID."""
    if form.nbytes == 0:
        raise invalid(f"{form.name} of shape {form.shape} is empty")
    if form.address == 0:  # torch's tensors on "meta", and fake ones
        raise invalid(f"{form.name} of shape {form.shape} has no memory")


def check_described(form: TensorForm, desc: CacheDesc) -> None:
    """Refuse a tensor whose form contradicts `desc`; its device is not compared.

    Flat bytes need only be dense and of the right size. Dimensions of length 1 are ignored.
    """
    check_present(form)
    if form.is_raw:
        _check_dense(form)
        if form.nbytes != desc.tensor_nbytes:
            raise invalid(
                f"{form.name} has {form.nbytes} bytes; a tensor of the cache, of shape "
                f"{desc.shape} and {desc.data_type.name}, has {desc.tensor_nbytes}"
            )
        return
    shape = desc.shape if form.data_type is desc.data_type else array_form(desc)[0]
    as_shape = _long(form.memory_shape) == _long(shape)
    rows = _rows_of(form, shape, desc.batch_dim_index) if as_shape else -1
    gap = form.gap(rows)
    apart = desc.stride if rows < 0 else form.row_stride(rows)
    if gap is None and as_shape and form.may_be(desc.data_type) and apart == desc.stride:
        return
    layout = f" ({desc.kv_tensor_format})" if desc.kv_tensor_format else ""
    says = f"cache_desc says {desc.data_type.name} of shape {desc.shape}{layout}"
    if not form.may_be(desc.data_type):
        remedy = "; give a view of that type, or of its bytes (flat, uint8), if it holds that"
    elif gap is not None:
        remedy = f"; its bytes do not lie together: {_gap_text(form, gap, None)}"
    elif apart != desc.stride:
        says += f", of rows {desc.stride} bytes apart"
        remedy = f"; its rows lie {apart} bytes apart, which CacheDesc.from_tensors describes"
    elif form.memory_shape != form.shape:
        remedy = (
            f"; in memory its dimensions are {form.memory_shape}, which CacheDesc.from_tensors "
            "describes"
        )
    else:
        remedy = "; give a view of that shape, or another cache_desc"
    raise invalid(f"{form.name} is {form}; {says}{remedy}")


def describe(
    tensors: Sequence[Any],
    layout: CacheLayout | str | None,
    data_type: DataType | None,
    placement: Placement | None,
    shard: Shard | None,
) -> CacheDesc:
    """See `CacheDesc.from_tensors`."""
    if isinstance(tensors, str | bytes | bytearray) or not isinstance(tensors, Sequence):
        raise TypeError(
            f"tensors must be a list of tensors, one or more for each layer, not "
            f"{type(tensors).__name__}"
        )
    if not tensors:
        raise invalid("tensors is empty; a cache needs at least one tensor")
    forms = [read_form(f"tensors[{position}]", tensor) for position, tensor in enumerate(tensors)]
    first = forms[0]
    if layout is not None and not isinstance(layout, CacheLayout):
        layout = CacheLayout(check_type("layout", layout, str))
    if layout is not None and len(layout.axes) != len(first.shape):
        raise invalid(
            f"layout={shown(str(layout))} names {len(layout.axes)} axes; {first.name} is {first}, "
            f"of {len(first.shape)} dimensions"
        )
    rows = 0 if layout is None else layout.row_axis
    for form in forms:
        _check_alike(form, first, rows)
        if form.nbytes == 0:
            raise invalid(f"{form.name} of shape {form.shape} is empty")
        if (gap := form.gap(rows)) is not None:
            raise invalid(f"{form.name} is {form}: {_gap_text(form, gap, layout)}")
    if layout is not None:
        layout = CacheLayout(" ".join(layout.axes[dim] for dim in first.order))
    elif first.order != tuple(range(len(first.shape))):
        raise invalid(f"{first.name} is {first}, which needs a layout: it is not C-contiguous")
    if data_type is None:
        data_type = first.data_type
        if data_type is None:
            raise invalid(f"{first.name} is {first}, which is not a DataType; give data_type")
    elif check_type("data_type", data_type, DataType).bits % 8 or not first.may_be(data_type):
        raise invalid(f"data_type={data_type.name} does not fit {first.name}, which is {first}")
    if placement is None:
        placement = Placement.HOST if first.device is None else Placement.DEVICE
    return CacheDesc(
        len(forms),
        first.memory_shape,
        data_type,
        placement,
        kv_tensor_format=None if layout is None else str(layout),
        shard=shard,
        row_stride=first.row_stride(rows) if first.shape else None,
    )


def _rows_of(form: TensorForm, shape: tuple[int, ...], axis: int) -> int:
    """Return the dimension of a tensor that is axis `axis` of `shape` in memory; -1: length 1.

    The shapes may differ in dimensions of length 1.
    """
    if shape[axis] == 1:
        return -1
    return _long_dims(form)[len(_long(shape[:axis]))]


def _check_alike(form: TensorForm, first: TensorForm, rows: int) -> None:
    if (form.shape, form.dtype_name) != (first.shape, first.dtype_name):
        raise invalid(
            f"{form.name} is {form}, and {first.name} is {first}: tensors of one cache must be "
            "alike; describe the others as another cache"
        )
    if _long_dims(form) != _long_dims(first):
        raise invalid(
            f"{form.name} is {form}, and {first.name} is {first}: the order of their dimensions "
            "in memory differs; describe them as two caches"
        )
    if first.shape and form.row_stride(rows) != first.row_stride(rows):
        raise invalid(
            f"{form.name} is {form}, and {first.name} is {first}: the distances of their rows "
            "differ; describe them as two caches"
        )
    if form.device != first.device:
        where = [
            "in host memory" if one.device is None else f"on {one.device.text}"
            for one in (form, first)
        ]
        raise invalid(f"{form.name} is {where[0]}, and {first.name} {where[1]}")


def _gap_text(form: TensorForm, gap: tuple[int, int], layout: CacheLayout | None) -> str:
    """Describe a gap or an overlap in a tensor, and the remedy."""
    dim, has = gap
    apart, own = form.strides[dim] * form.bits // 8, has * form.bits // 8
    axis = "" if layout is None else layout.axes[dim]
    things = _PLURALS.get(axis, f"{axis}s") if axis else f"elements along dimension {dim}"
    if apart <= 0:
        way = "run backwards" if apart else "are all the same memory"
        return (
            f"its {things} {way}; give a tensor whose elements have memory of their own, in order"
        )
    text = f"its {things} lie {apart} bytes apart and have {own}"
    if apart < own:
        return f"{text}: they share memory; give a tensor whose elements do not"
    if axis in ("kv", "layer"):
        return f"{text}: give each of them as a tensor of its own"
    return (
        f"{text}: give the tensor that it is a view of, or tensors in which each block or slot "
        "lies together"
    )


def _long(shape: tuple[int, ...]) -> list[int]:
    return [length for length in shape if length != 1]


def _long_dims(form: TensorForm) -> list[int]:
    return [dim for dim in form.order if form.shape[dim] != 1]
