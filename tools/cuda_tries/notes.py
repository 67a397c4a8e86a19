"""Notes of a try, step by step, in a file that its parent reads even if the process dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvplan.device.cuda import CudaDevice

Outcome = Literal["ok", "FAILED", "refused", "skipped", "says"]


class SkippedError(Exception):
    """A try needs something that is not here; the message says what."""


@dataclass
class Notes:
    """The notes of one try.

    Attributes:
        quick: whether to be small.
        put: takes each step, and each row of figures.
    """

    quick: bool
    put: Callable[[dict[str, Any]], object]

    def add(self, step: str, outcome: Outcome, detail: str = "") -> None:
        """Write a step down."""
        self.put({"step": step, "outcome": outcome, "detail": detail})

    def expect(self, step: str, good: object, detail: str = "") -> None:
        """Write down that it went well, or did not."""
        self.add(step, "ok" if good else "FAILED", detail)

    def same(self, step: str, found: NDArray[np.uint8], expected: NDArray[np.uint8]) -> None:
        """Compare every byte."""
        from benchmarks.gpu_driver import difference

        wrong = difference(found, expected)
        self.expect(step, not wrong, wrong)

    @contextmanager
    def refusal(self, step: str, *statuses: str) -> Iterator[None]:
        """Check that the block is refused with one of these statuses."""
        from kvplan import LLMException

        try:
            yield
        except LLMException as error:
            name = error.status_code.name
            self.expect(step, name in statuses, f"{name}: {error.args[0]}")
        else:
            self.add(step, "FAILED", f"it was not refused with {' or '.join(statuses)}")


Try = Callable[[Notes], None]


def random_bytes(seed: int, *shape: int) -> NDArray[np.uint8]:
    """Return bytes that depend only on the seed; none of them is 0."""
    import numpy as np

    return np.random.default_rng(seed).integers(1, 256, shape, np.uint8)


@contextmanager
def the_device() -> Iterator[CudaDevice]:
    """Open the first GPU."""
    from kvplan.device.cuda import CudaDevice

    device = CudaDevice(0)
    try:
        yield device
    finally:
        device.close()
