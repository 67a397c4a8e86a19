"""The names of a `Peer`: those of kvplan, and the memory of a machine."""

import gc
from typing import Any

import numpy as np

import kvplan
from tests.datadist.machine import machine_of


def names(machine_name: str) -> dict[str, Any]:
    """Return names for one engine after another."""
    machine = machine_of(machine_name, cluster_id=1)

    def forget() -> dict[str, int]:
        """End the engine and drop all objects of a test; return what is left on the device."""
        known["datadist"].finalize()
        for key in known.keys() - kept:
            del known[key]
        gc.collect()
        return machine.left()

    known: dict[str, Any] = {item: getattr(kvplan, item) for item in kvplan.__all__}
    known |= {
        "np": np,
        "kvplan": kvplan,
        "LlmDataDist": machine.engine,
        "zeros": machine.zeros,
        "addresses": machine.addresses,
        "forget": forget,
    }
    kept = {*known, "result", "__builtins__"}
    return known
