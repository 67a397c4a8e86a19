"""Execution of plans: check and bind memory, lower and submit descriptors.

This package must not import devices, transports or engines. Memory comes as `TensorMemory`.
"""

from kvplan.execution.compute_events import ComputeEvent, ComputeStream
from kvplan.execution.gather_task import GatherError, GatherTask
from kvplan.execution.layer_task import LayerGatherTask, LayerProgress, LayerTask
from kvplan.execution.memory import HostMemory, Memory, TensorMemory
from kvplan.execution.task import TransferTask
from kvplan.execution.transfers import Transfers, default_transfers, execute, submit

__all__ = [
    "ComputeEvent",
    "ComputeStream",
    "GatherError",
    "GatherTask",
    "HostMemory",
    "LayerGatherTask",
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
