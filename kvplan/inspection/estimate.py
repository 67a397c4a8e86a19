"""What a transfer is expected to take, and what of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.inspection.units import nbytes_text, plural


@dataclass(frozen=True)
class Estimate:
    """The time that a plan is expected to take over a transport; `print` shows its parts.

    From the call of an operation to its return: both ends idle, every page touched before, the
    bytes not in a cache. Waiting for others, and for a lost packet, is not in it.

    Attributes:
        operation: the plan's.
        transport: the name of the costs that were used.
        way: how bytes move: "mapped", "one-sided".
        call: what the transfer is cut into, in the singular: "message", "native call".
        calls: how many of them.
        descriptors, nbytes: the plan's.
        fixed_ms, calls_ms, descriptors_ms, bytes_ms: what adds up to `ms`.
    """

    operation: str
    transport: str
    way: str
    call: str
    calls: int
    descriptors: int
    nbytes: int
    fixed_ms: float
    calls_ms: float
    descriptors_ms: float
    bytes_ms: float

    @property
    def ms(self) -> float:
        """Milliseconds in all."""
        return self.fixed_ms + self.calls_ms + self.descriptors_ms + self.bytes_ms

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes in 10**9 a second, over all of the time."""
        return self.nbytes / self.ms / 1e6

    def outline(self) -> str:
        """One line: how it moves, and how long."""
        return (
            f"over {self.transport}: {self.way}, {plural(self.calls, self.call)} | "
            f"{nbytes_text(self.nbytes)} | about {ms_text(self.ms)}"
        )

    def __str__(self) -> str:
        parts = (
            ("fixed", self.fixed_ms),
            (plural(self.calls, self.call), self.calls_ms),
            (plural(self.descriptors, "descriptor"), self.descriptors_ms),
            (nbytes_text(self.nbytes), self.bytes_ms),
        )
        told = [f"  {ms_text(ms):>8}  {what}" for what, ms in parts if ms]
        head = f"{self.operation} over {self.transport}, {self.way}: {ms_text(self.ms)}"
        return "\n".join([f"{head}, {self.gigabytes_per_s:.2f} GB/s", *told])


def ms_text(ms: float) -> str:
    """`0.024 ms`, `1.08 ms`, `112 ms`: three digits that count."""
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 1 else 3
    return f"{ms:.{digits}f} ms"
