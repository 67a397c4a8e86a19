"""Plans meet memory here: addresses are checked and bound, descriptors lowered and submitted."""

from kvplan.execution.compute_events import ComputeEvent, ComputeStream
from kvplan.execution.layer_task import LayerProgress, LayerTask
from kvplan.execution.memory import HostMemory, Memory, TensorMemory
from kvplan.execution.task import TransferTask
from kvplan.execution.transfers import Transfers, default_transfers, execute, submit

__all__ = [
    "ComputeEvent",
    "ComputeStream",
    "HostMemory",
    "LayerProgress",
    "LayerTask",
    "Memory",
    "TensorMemory",
    "TransferTask",
    "Transfers",
    "default_transfers",
    "execute",
    "submit",
]
