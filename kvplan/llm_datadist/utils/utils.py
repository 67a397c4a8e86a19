"""Checks of arguments, as strict as those of the original, and properties that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast, get_args, overload

from kvplan.validation import INT64_MAX, UINT32_MAX, UINT64_MAX, mismatch, shown

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


def check_isinstance(
    arg_name: str,
    arg_value: _T,
    classes: type | list[type],
    inner_class: type | None = None,
    extra_fmt: str = "",
    allow_none: bool = True,
) -> _T:
    """Return `arg_value` if it is an instance of one of `classes`.

    Args:
        arg_name: its name in messages.
        arg_value: the argument.
        classes: the allowed classes. A bool is not an int.
        inner_class: the class of its elements; None: any.
        extra_fmt: the beginning of messages.
        allow_none: True to accept None.

    Raises:
        TypeError: the argument is of another class.
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
    """Return True if `value` is of one of `kinds`. A bool is of class bool only."""
    return isinstance(value, tuple(kinds)) and (not isinstance(value, bool) or bool in kinds)


def check_inner(arg_name: str, arg_value: Iterable[object], inner_class: type) -> None:
    """Refuse an element that is not an `inner_class`.

    Raises:
        TypeError: names the element.
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
    """Refuse a key, a value, or an element of a value that is of another class.

    Raises:
        TypeError: names the first of them.
    """
    for key, value in arg_value.items():
        check_isinstance(f"{arg_name} key", key, k_class, allow_none=False)
        check_isinstance(f"{arg_name}[{shown(key)}]", value, v_class, allow_none=False)
        if v_inner_class is not None:
            assert isinstance(value, Iterable)
            check_inner(f"{arg_name}[{shown(key)}]", value, v_inner_class)


def _width(kind: str, low: int, high: int) -> Callable[[str, object], None]:
    """Return a check for an integer type."""

    def check(arg_name: str, arg_value: object) -> None:
        _check_width(arg_name, arg_value, low, high)

    check.__name__ = check.__qualname__ = f"check_{kind}"
    check.__doc__ = f"""Refuse anything but an int in [{low}, {high}].

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    return check


check_uint8 = _width("uint8", 0, 2**8 - 1)
check_uint16 = _width("uint16", 0, 2**16 - 1)
check_uint32 = _width("uint32", 0, UINT32_MAX)
check_uint64 = _width("uint64", 0, UINT64_MAX)
check_int32 = _width("int32", -(2**31), 2**31 - 1)
check_int64 = _width("int64", -(2**63), INT64_MAX)


def _width_of_each(
    kind: str, check_one: Callable[[str, object], None]
) -> Callable[[str, Iterable[object]], None]:
    """Return a check for a list of integers."""

    def check(arg_name: str, arg_value: Iterable[object]) -> None:
        for element in arg_value:
            check_one(arg_name, element)

    check.__name__ = check.__qualname__ = f"check_list_{kind}"
    check.__doc__ = f"""Refuse an element that `check_{kind}` refuses.

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    return check


check_list_int32 = _width_of_each("int32", check_int32)
check_list_int64 = _width_of_each("int64", check_int64)
check_list_uint64 = _width_of_each("uint64", check_uint64)


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


Kind = Callable[[str, Any], Any]
"""A check: takes an argument's name and value, and raises if the value is not of the kind."""


def kind_of(*classes: type, inner: type | None = None, allow_none: bool = False) -> Kind:
    """Return a check for values of these classes, with elements of class `inner`."""

    def check(name: str, value: Any) -> Any:
        return check_isinstance(name, value, [*classes], inner, allow_none=allow_none)

    return check


def checked(kinds: Mapping[str, Kind]) -> Callable[..., Callable[[_F], _F]]:
    """Return a decorator that checks arguments by their names, in order, before each call.

    Args:
        kinds: a check for each name. Keywords of the decorator override `kinds` for one function.
    """

    def of_function(**others: Kind) -> Callable[[_F], _F]:
        known = {**kinds, **others}

        def decorate(function: _F) -> _F:
            names = tuple(signature(function).parameters)

            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                for name, value in zip(names, args, strict=False):
                    if name in known:
                        known[name](name, value)
                for name in kwargs and names:
                    if name in known and name in kwargs:
                        known[name](name, kwargs[name])
                return function(*args, **kwargs)

            return cast("_F", call)

        return decorate

    return of_function


class Field(property, Generic[_T]):
    """A read-only property; the attribute `_<name>` holds its value.

    Args:
        doc: its docstring.
    """

    def __init__(self, doc: str) -> None:
        super().__init__(self._getter(doc))

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self._attribute = f"_{name}"
        # Annotated like a getter `-> int`, for documentation.
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
    """A property that is checked whenever it is set.

    Args:
        check: takes the name and the new value; returns the value to keep, or raises.
        doc: its docstring.
    """

    def __init__(self, check: Callable[[str, _T], _T], doc: str) -> None:
        property.__init__(self, self._getter(doc), self._write)
        self._check = check

    def _write(self, owner: Any, value: _T) -> None:
        setattr(owner, self._attribute, self._check(self.name, value))

    if TYPE_CHECKING:

        def __set__(self, owner: Any, value: _T, /) -> None: ...


def checked_by(check: Callable[[str, object], None]) -> Callable[[str, _T], _T]:
    """Return a function that runs `check` and returns the value unchanged."""

    def keep(name: str, value: _T) -> _T:
        check(name, value)
        return value

    return keep
