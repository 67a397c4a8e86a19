"""Plans meet memory here: addresses are checked and bound, descriptors lowered and submitted."""

from kvplan.engine.execution import Transfers, default_transfers, execute, submit
from kvplan.engine.memory import HostMemory, Memory, TensorMemory
from kvplan.engine.task import TransferTask

__all__ = [
    "HostMemory",
    "Memory",
    "TensorMemory",
    "TransferTask",
    "Transfers",
    "default_transfers",
    "execute",
    "submit",
]
