"""Properties of the values: one line for each, and one place for how they are kept and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, get_args, overload

_T = TypeVar("_T")


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
