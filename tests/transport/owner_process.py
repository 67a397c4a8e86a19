"""A process that offers its memory, and otherwise sits in a read on a pipe.

Each line on stdin is a JSON string of Python to execute; what it leaves in `result` is the answer.
Between two lines no Python runs here: what peers do meanwhile, they do without its help.
"""

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
    """Execute line after line, until there is none."""
    for line in sys.stdin:
        names["result"] = None
        try:
            exec(json.loads(line), names)
            answer = {"result": names["result"]}
        except Exception:
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve({"transport": LocalTransport(), "np": np, "pattern": pattern})
