from collections.abc import Sequence
from typing import NamedTuple

from kvnative._lower import Descriptors

__all__ = [
    "MAX_PIECE_NBYTES",
    "NEVER",
    "Tuning",
    "builtin_tuning",
    "check_tuning",
    "measure_copies",
]

MAX_PIECE_NBYTES: int
NEVER: int

class Tuning(NamedTuple):
    threads: int
    bypass_nbytes: int
    piece_nbytes: int

def builtin_tuning() -> Tuning: ...
def check_tuning(given: Tuning) -> None: ...
def measure_copies(
    candidates: Sequence[Tuning],
    descriptors: Descriptors,
    *,
    at_once: int,
    rounds: int,
    deadline_ns: int,
) -> tuple[list[list[int]], float]: ...
