"""An engine in a process of its own, told what to do line by line.

Each line on stdin is a JSON string of Python to execute; what it leaves in `result` is the answer.
"""

import json
import sys
import traceback

import numpy as np

import kvplan


def main() -> None:
    names = {"np": np, "kvplan": kvplan, **{name: getattr(kvplan, name) for name in kvplan.__all__}}
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
    main()
