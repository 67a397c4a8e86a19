"""A row of the table: a call, the answer of the official engine, and the answer of kvplan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvplan.llm_datadist import LLMException, LLMStatusCode

ANYTHING = object()


@dataclass(frozen=True)
class Accepted:
    """An outcome: the call returned. A recorded value is compared by `repr` (True is not 1)."""

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
    """An outcome: the call raised exactly this type; an LLMException also has this status."""

    error: type[BaseException]
    status: LLMStatusCode | None = None

    def __str__(self) -> str:
        return self.error.__name__ if self.status is None else self.status.name


@dataclass(frozen=True)
class Row:
    """A measured case.

    Attributes:
        case: Name of the case in the measurement.
        official: Outcome of the official engine.
        call: The case itself; its argument is the environment, if there is one.
        environment: Name of a method of `Environments`, or empty.
        ours: Outcome of kvplan, if it differs.
        why: Reason of the difference, in one line.
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
    """A difference between the official engine and kvplan in words, with its proofs.

    Attributes:
        official: Behaviour of the official package, as measured or read.
        here: Behaviour of kvplan.
        cases: Cases that show the difference, outside of the table.
        rows: Names of rows of the table that show the difference.
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
    """Return the outcome of `call`."""
    try:
        return Accepted(call())
    except LLMException as error:
        return status(error.status_code)
    except Exception as error:
        return Raised(type(error))
