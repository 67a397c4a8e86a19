"""A property of the configuration: how it is checked, what it is while unset, how it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvplan.llm_datadist.fields import Checked
from kvplan.llm_datadist.utils.utils import check_dict, check_int32, check_isinstance
from kvplan.status import invalid
from kvplan.validation import shown

_T = TypeVar("_T")


class Setting(Checked[_T]):
    """A property that becomes an option.

    Args:
        keys: of the option; of several the first gets all values, the others the first value.
        check: as of `Checked`.
        doc: what it is.
        initial: what it is until it is set; if that is empty or False it is no option then.
        none: what None is read as.
    """

    def __init__(
        self,
        keys: str | tuple[str, ...],
        check: Callable[[str, _T], _T],
        doc: str,
        initial: Any = None,
        none: Any = None,
    ) -> None:
        super().__init__(check, doc)
        self._keys = (keys,) if isinstance(keys, str) else keys
        self._initial = initial
        self._none = none

    def _held(self, config: Any) -> Any:
        return vars(config).get(self._attribute, self._initial)

    def _read(self, config: Any) -> Any:
        held = self._held(config)
        return self._none if held is None else held

    def written(self, config: object) -> dict[str, str]:
        """Return the options of `config` that it makes; none while it is unset.

        Raises:
            LLMException: LLM_PARAM_INVALID: an empty list.
        """
        held = self._held(config)
        if held is None or (held == self._initial and not held):
            return {}
        values = held if isinstance(held, list | tuple) else [held]
        if not values:
            raise invalid(f"{self.name}={held} is empty; at least one is needed")
        texts = [str(int(it) if isinstance(it, bool) else it) for it in values]
        return {
            key: texts[0] if position else ";".join(texts)
            for position, key in enumerate(self._keys)
        }


def check_text(name: str, text: _T) -> _T:
    """Return a text, or None."""
    return check_isinstance(name, text, str)


def check_bool(name: str, value: _T) -> _T:
    """Return a bool, or None."""
    return check_isinstance(name, value, bool)


def checked_int(name: str, value: _T) -> _T:
    """Return an int, or None."""
    return check_isinstance(name, value, int)


def within(low: int, high: int) -> Callable[[str, int], int]:
    """Return what checks that an int is in [low, high]."""

    def check(name: str, value: int) -> int:
        check_isinstance(name, value, int, allow_none=False)
        if not low <= value <= high:
            raise invalid(f"{name}={value} is out of range [{low}, {high}]")
        return value

    return check


def checked_fraction(name: str, value: float) -> float:
    """Return a float in [0, 1]."""
    check_isinstance(name, value, float, allow_none=False)
    if not 0.0 <= value <= 1.0:
        raise invalid(f"{name}={value} is out of range [0, 1]")
    return value


def checked_ge_options(name: str, options: dict[str, str]) -> dict[str, str]:
    """Return a dict of texts."""
    check_isinstance(name, options, dict, allow_none=False)
    check_dict(name, options, str, str)
    return options


def checked_device_id(
    name: str, device_id: int | list[int] | tuple[int, ...]
) -> int | list[int] | tuple[int, ...]:
    """Return an int32 >= 0, or several."""
    check_isinstance(name, device_id, [list, tuple, int], allow_none=False)
    ids = device_id if isinstance(device_id, list | tuple) else [device_id]
    check_isinstance(name, ids, [list, tuple], int)
    for each in ids:
        if each < 0:
            raise invalid(f"{name}={shown(device_id)} is out of range [0, 2**31)")
    for each in ids:
        check_int32(name, each)
    return device_id


def checked_timeout(name: str, timeout: int | str) -> int | str:
    """Return an int32 > 0, or its digits."""
    check_isinstance(name, timeout, [int, str], allow_none=False)
    if isinstance(timeout, str) and not timeout.isdecimal():
        raise invalid(f"{name}={shown(timeout)} must be digits: milliseconds")
    if int(timeout) <= 0:
        raise invalid(f"{name}={shown(timeout)} is out of range [1, 2**31)")
    check_int32(name, int(timeout))
    return timeout
