from typing import final

from kvnative._task import AnyTask

__all__ = ["STAGE_DONE", "STAGE_FAILED", "STAGE_MOVING", "STAGE_WAITING", "StagedTask"]

STAGE_WAITING: int
STAGE_MOVING: int
STAGE_DONE: int
STAGE_FAILED: int

@final
class StagedTask(AnyTask):
    @property
    def num_stages(self) -> int: ...
    @property
    def sealed(self) -> bool: ...
    def open(self, stage: int) -> bool: ...
    def states(self) -> tuple[int, ...]: ...
