from collections.abc import Sequence
from typing import NamedTuple

from kvnative._lower import Descriptors

__all__ = [
    "MAX_PIECE_NBYTES",
    "STRATEGIES",
    "Tuning",
    "builtin_tuning",
    "check_strategy",
    "check_tuning",
    "measure_copies",
    "usable_strategies",
]

MAX_PIECE_NBYTES: int
STRATEGIES: tuple[str, ...]

class Tuning(NamedTuple):
    threads: int
    cached: str
    bypassing: str
    bypass_nbytes: int
    piece_nbytes: int

def usable_strategies() -> tuple[str, ...]: ...
def builtin_tuning() -> Tuning: ...
def check_strategy(name: str) -> None: ...
def check_tuning(given: Tuning) -> None: ...
def measure_copies(
    candidates: Sequence[Tuning],
    descriptors: Descriptors,
    *,
    rounds: int,
    deadline_ns: int,
) -> tuple[list[list[int]], float]: ...
