"""Checks of arguments, as strict as those of the original: bool is no int, None is often fine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from kvplan.validation import INT64_MAX, UINT32_MAX, UINT64_MAX, mismatch, shown

_T = TypeVar("_T")


def check_isinstance(
    arg_name: str,
    arg_value: _T,
    classes: type | list[type],
    inner_class: type | None = None,
    extra_fmt: str = "",
    allow_none: bool = True,
) -> _T:
    """Return `arg_value` if it is one of `classes`.

    Args:
        arg_name: what messages call it.
        arg_value: the argument.
        classes: what it may be.
        inner_class: what its elements must be; None: anything.
        extra_fmt: what messages begin with.
        allow_none: whether it may be None.

    Raises:
        TypeError: otherwise.
    """
    if allow_none and arg_value is None:
        return arg_value
    kinds = classes if isinstance(classes, list) else [classes]
    if not _is_of(arg_value, kinds):
        raise TypeError(
            f"{extra_fmt}{arg_name}={shown(arg_value)}: {arg_name} only supports "
            f"{mismatch(arg_value, *kinds)}"
        )
    if inner_class is not None:
        assert isinstance(arg_value, Iterable)
        check_inner(arg_name, arg_value, inner_class)
    return arg_value


def _is_of(value: object, kinds: list[type]) -> bool:
    """Return whether `value` is of one of `kinds`. A bool is of bool only."""
    return isinstance(value, tuple(kinds)) and (not isinstance(value, bool) or bool in kinds)


def check_inner(arg_name: str, arg_value: Iterable[object], inner_class: type) -> None:
    """Refuse an element that is not an `inner_class`.

    Raises:
        TypeError: naming it.
    """
    for element in arg_value:
        if not _is_of(element, [inner_class]):
            raise TypeError(
                f"{arg_name} holds {shown(element)}: its inner type only supports "
                f"{mismatch(element, inner_class)}"
            )


def check_dict(
    arg_name: str,
    arg_value: Mapping[Any, object],
    k_class: type,
    v_class: type,
    v_inner_class: type | None = None,
) -> None:
    """Refuse keys other than `k_class`, values other than `v_class`, and elements of values.

    Raises:
        TypeError: naming the first.
    """
    for key, value in arg_value.items():
        check_isinstance(f"{arg_name} key", key, k_class, allow_none=False)
        check_isinstance(f"{arg_name}[{shown(key)}]", value, v_class, allow_none=False)
        if v_inner_class is not None:
            assert isinstance(value, Iterable)
            check_inner(f"{arg_name}[{shown(key)}]", value, v_inner_class)


def check_uint8(arg_name: str, arg_value: object) -> None:
    """Refuse anything but an int in [0, 2**8).

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    _check_width(arg_name, arg_value, 0, 2**8 - 1)


def check_uint16(arg_name: str, arg_value: object) -> None:
    """Refuse anything but an int in [0, 2**16).

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    _check_width(arg_name, arg_value, 0, 2**16 - 1)


def check_uint32(arg_name: str, arg_value: object) -> None:
    """Refuse anything but an int in [0, 2**32).

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    _check_width(arg_name, arg_value, 0, UINT32_MAX)


def check_uint64(arg_name: str, arg_value: object) -> None:
    """Refuse anything but an int in [0, 2**64).

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    _check_width(arg_name, arg_value, 0, UINT64_MAX)


def check_int32(arg_name: str, arg_value: object) -> None:
    """Refuse anything but an int in [-2**31, 2**31).

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    _check_width(arg_name, arg_value, -(2**31), 2**31 - 1)


def check_int64(arg_name: str, arg_value: object) -> None:
    """Refuse anything but an int in [-2**63, 2**63).

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    _check_width(arg_name, arg_value, -(2**63), INT64_MAX)


def check_list_int32(arg_name: str, arg_value: Iterable[object]) -> None:
    """Refuse an element that `check_int32` refuses.

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    for element in arg_value:
        check_int32(arg_name, element)


def check_list_int64(arg_name: str, arg_value: Iterable[object]) -> None:
    """Refuse an element that `check_int64` refuses.

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    for element in arg_value:
        check_int64(arg_name, element)


def check_list_uint64(arg_name: str, arg_value: Iterable[object]) -> None:
    """Refuse an element that `check_uint64` refuses.

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    for element in arg_value:
        check_uint64(arg_name, element)


def check_positive_or_set_default(arg_name: str, arg_value: int | None, default: int = -1) -> int:
    """Return `arg_value` if it is an int in [0, 2**63), `default` for None.

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    if arg_value is None:
        return default
    check_isinstance(arg_name, arg_value, int)
    _check_width(arg_name, arg_value, 0, INT64_MAX)
    return arg_value


def _check_width(arg_name: str, arg_value: object, low: int, high: int) -> None:
    check_isinstance(arg_name, arg_value, int, allow_none=False)
    assert isinstance(arg_value, int)
    if not low <= arg_value <= high:
        raise ValueError(f"{arg_name}={arg_value} is out of range [{low}, {high}]")
