"""One engine in a process, as in the original; several where somebody says so."""

from __future__ import annotations

import os
from threading import RLock
from typing import TYPE_CHECKING, Final

from kvplan.status import LLMException

if TYPE_CHECKING:
    from kvplan.llm_datadist.v2.llm_datadist import LLMDataDist

SEVERAL_ENGINES: Final = "KVPLAN_SEVERAL_ENGINES"
"""Environment variable: "1" permits several engines from the start."""


class Seats:
    """The engines of this process that are initialized; they are held until they are finalized.

    Attributes:
        mutex: what initializing and finalizing take turns with.
        several: whether there may be more than one.
    """

    def __init__(self) -> None:
        self.mutex = RLock()
        self.several = False
        self._taken: list[LLMDataDist] = []

    @property
    def taken(self) -> tuple[LLMDataDist, ...]:
        """In the order in which they were initialized."""
        return tuple(self._taken)

    @property
    def latest(self) -> LLMDataDist | None:
        """The last of several; None where there is to be one, which has been finalized now."""
        return self._taken[-1] if self._taken and self._are_several else None

    @property
    def _are_several(self) -> bool:
        return self.several or os.environ.get(SEVERAL_ENGINES) == "1"

    def check_free(self, other: LLMDataDist | None) -> None:
        """Refuse one engine too many.

        Args:
            other: that is initialized; None: there is none.

        Raises:
            LLMException: LLM_FAILED.
        """
        if other is None or self._are_several:
            return
        raise LLMException(
            f"cluster {other.cluster_id} is initialized, and a process has one LLMDataDist: "
            "finalize it first, or call kvplan.llm_datadist.permit_several_engines()"
        )

    def take(self, engine: LLMDataDist) -> None:
        """`engine` is initialized."""
        self._taken.append(engine)

    def leave(self, engine: LLMDataDist) -> None:
        """`engine` is finalized."""
        self._taken = [it for it in self._taken if it is not engine]

    def forget(self) -> None:
        """In a forked child: all of them are the parent's."""
        self.mutex = RLock()
        self._taken = []


SEATS: Final = Seats()


def permit_several_engines(permit: bool = True) -> None:
    """Let this process initialize more than one LLMDataDist, linked with each other if it likes.

    `KVPLAN_SEVERAL_ENGINES=1` in the environment permits it too.

    Args:
        permit: False: one again; those that are initialized stay.
    """
    SEATS.several = permit
