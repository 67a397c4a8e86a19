from typing import Final, final

from kvnative._task import AnyTask, Gate

__all__ = ["LAYER_DONE", "LAYER_FAILED", "LAYER_MOVING", "LAYER_WAITING", "LayeredTask"]

LAYER_WAITING: int
LAYER_MOVING: int
LAYER_DONE: int
LAYER_FAILED: int

@final
class LayeredTask(AnyTask):
    num_layers: Final[int]
    @property
    def sealed(self) -> bool: ...
    def open(self, layer: int, after: Gate | None = None) -> bool: ...
    def states(self) -> tuple[int, ...]: ...
