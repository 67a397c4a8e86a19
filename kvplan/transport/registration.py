"""Memory that peers may reach, as its owner holds it: the same for each transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from kvplan.status import invalid
from kvplan.transport.ranges import RegisteredRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SlotRange(RegisteredRange, Protocol):
    """A range whose slot on the owner's board says whether it is still registered."""

    @property
    def slot(self) -> int:
        """See above."""


_Range = TypeVar("_Range", bound=SlotRange)


class RegisteredMemory(Generic[_Range]):
    """What registrations of all transports say of themselves; the fields are theirs."""

    __slots__ = ()
    range: _Range

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return self.range.address

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.range.nbytes

    @property
    def writable(self) -> bool:
        """Whether peers may write to it."""
        return self.range.writable

    def __repr__(self) -> str:
        return f"<Registration of {self.range}>"

    @classmethod
    def own(cls, registration: object, transport: str) -> Self:
        """`registration`, if it is one of `transport`, such as "a local transport".

        Raises:
            TypeError: it is something else.
        """
        if not isinstance(registration, cls):
            raise TypeError(
                f"registration is a {type(registration).__name__}; it must be a Registration that "
                f"`register` of {transport} has returned"
            )
        return registration


def ranges_of(
    given: Sequence[RegisteredMemory[_Range]] | None,
    held: Mapping[int, RegisteredMemory[_Range]],
) -> tuple[_Range, ...]:
    """As peers are told `given` (None: all) of those that are `held` by slot.

    Raises:
        LLMException: LLM_PARAM_INVALID: one of them is not held, or no longer.
    """
    if given is None:
        return tuple(it.range for it in held.values())
    for it in given:
        if held.get(it.range.slot) is not it:
            raise invalid(f"{it!r} is not registered here, or no longer")
    return tuple(it.range for it in given)
