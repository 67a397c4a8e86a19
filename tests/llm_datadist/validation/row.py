"""A row of the table: a call, what the official engine answered to it, and what kvplan does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvplan.llm_datadist import LLMException, LLMStatusCode

ANYTHING = object()


@dataclass(frozen=True)
class Accepted:
    """The call returned; where the value was recorded, it is compared by `repr` (True is not 1)."""

    value: object = ANYTHING

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Accepted):
            return False
        return ANYTHING in (self.value, other.value) or repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(Accepted)

    def __str__(self) -> str:
        return "accepted"


@dataclass(frozen=True)
class Raised:
    """The call raised exactly this type; an LLMException, with this status."""

    error: type[BaseException]
    status: LLMStatusCode | None = None

    def __str__(self) -> str:
        return self.error.__name__ if self.status is None else self.status.name


@dataclass(frozen=True)
class Row:
    """One measured case.

    Attributes:
        case: its name in the measurement.
        official: what the official engine did.
        call: the case itself; it gets the environment if it needs one.
        environment: the name of a method of `Environments`, or empty.
        ours: what kvplan does, where it is something else.
        why: and the reason, in one line.
    """

    case: str
    official: Accepted | Raised
    call: Callable[..., object]
    environment: str = ""
    ours: Accepted | Raised | None = None
    why: str = ""

    @property
    def expected(self) -> Accepted | Raised:
        return self.official if self.ours is None else self.ours

    def __str__(self) -> str:
        return self.case


@dataclass(frozen=True)
class Difference:
    """In words, what the official engine does and what kvplan does, with the proofs.

    Attributes:
        official: what was measured or read there.
        here: what kvplan does.
        cases: that show it, and are no rows of the table.
        rows: names of rows of the table that show it.
    """

    official: str
    here: str
    cases: tuple[Row, ...] = ()
    rows: tuple[str, ...] = ()


def status(code: LLMStatusCode) -> Raised:
    return Raised(LLMException, code)


ACCEPTED = Accepted()
TYPE = Raised(TypeError)
VALUE = Raised(ValueError)
INVALID = status(LLMStatusCode.LLM_PARAM_INVALID)


def observe(call: Callable[[], object]) -> Accepted | Raised:
    """What `call` does, in the words of the table."""
    try:
        return Accepted(call())
    except LLMException as error:
        return status(error.status_code)
    except Exception as error:
        return Raised(type(error))
