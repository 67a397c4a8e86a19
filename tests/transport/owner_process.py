"""A process that offers its memory, and otherwise sits in a read on a pipe.

Each line on stdin is a JSON string of Python to execute; what it leaves in `result` is the answer.
Between two lines no Python runs here: what peers do meanwhile, they do without its help.
"""

import gc
import json
import sys
import traceback
from typing import Any

import numpy as np

from kvplan.transport.local import LocalTransport


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that both processes can make."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def serve(names: dict[str, Any]) -> None:
    """Execute line after line, until there are no more."""
    for line in sys.stdin:
        names["result"] = None
        try:
            exec(json.loads(line), names)
            answer = {"result": names["result"]}
        except Exception:
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Serve, one transport after another."""
    names: dict[str, Any] = {"np": np, "pattern": pattern}

    def renew() -> None:
        """Have a new transport, and nothing that a test has made."""
        if "transport" in names:
            names["transport"].close()
        for it in names.keys() - kept:
            del names[it]
        gc.collect()
        names["transport"] = LocalTransport()

    names["renew"] = renew
    kept = {*names, "result", "__builtins__"}
    renew()
    serve(names)


if __name__ == "__main__":
    main()
