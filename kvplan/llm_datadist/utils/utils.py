"""Checks of arguments, as strict as those of the original, and properties that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, get_args, overload

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


class Field(property, Generic[_T]):
    """A property that can only be read; the attribute `_<name>` holds its value.

    Args:
        doc: what it is.
    """

    def __init__(self, doc: str) -> None:
        super().__init__(self._getter(doc))

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self._attribute = f"_{name}"
        # Field[int](...) is annotated like a getter `-> int`, for those who read documentation.
        (annotation,) = get_args(self.__orig_class__)  # type: ignore[attr-defined]
        self.fget.__annotations__["return"] = annotation

    def _getter(self, doc: str) -> Callable[[Any], Any]:
        def get(owner: Any) -> Any:
            return self._read(owner)

        get.__doc__ = doc
        return get

    def _read(self, owner: Any) -> Any:
        return getattr(owner, self._attribute)

    if TYPE_CHECKING:

        @overload
        def __get__(self, owner: None, kind: type, /) -> Self: ...
        @overload
        def __get__(self, owner: Any, kind: type | None = None, /) -> _T: ...
        def __get__(self, owner: Any, kind: type | None = None, /) -> Any: ...


class Checked(Field[_T]):
    """A property that is checked when it is set.

    Args:
        check: gets the name and what it is set to; returns what to keep, or raises.
        doc: what it is.
    """

    def __init__(self, check: Callable[[str, _T], _T], doc: str) -> None:
        property.__init__(self, self._getter(doc), self._write)
        self._check = check

    def _write(self, owner: Any, value: _T) -> None:
        setattr(owner, self._attribute, self._check(self.name, value))

    if TYPE_CHECKING:

        def __set__(self, owner: Any, value: _T, /) -> None: ...


def checked_by(check: Callable[[str, object], None]) -> Callable[[str, _T], _T]:
    """Return what checks as `check` does, and keeps the value as it is."""

    def keep(name: str, value: _T) -> _T:
        check(name, value)
        return value

    return keep
