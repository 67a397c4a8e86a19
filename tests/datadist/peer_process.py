"""An engine in a process of its own, told what to do line by line: see `serve`."""

import gc
import sys
from typing import Any

import numpy as np

import kvplan
from tests.datadist.machine import machine_of
from tests.transport.owner_process import serve


def main(name: str) -> None:
    """Serve, on the machine of that name."""
    machine = machine_of(name, cluster_id=1)

    def forget() -> dict[str, int]:
        """End the engine and all that a test has made; returns what is left of the device."""
        names["datadist"].finalize()
        for it in names.keys() - kept:
            del names[it]
        gc.collect()
        return machine.left()

    names: dict[str, Any] = {it: getattr(kvplan, it) for it in kvplan.__all__}
    names |= {
        "np": np,
        "kvplan": kvplan,
        "LlmDataDist": machine.engine,
        "zeros": machine.zeros,
        "addresses": machine.addresses,
        "forget": forget,
    }
    kept = {*names, "result", "__builtins__"}
    serve(names)


if __name__ == "__main__":
    main(*sys.argv[1:])
