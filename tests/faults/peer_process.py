"""An engine in a process of its own, told what to do line by line.

Each line on stdin is a JSON string of Python to execute; what it leaves in `result` is the answer.
"""

import json
import sys
import traceback

import numpy as np

import kvplan
from kvnative import _executor
from tests.faults import contents, footprint, states

ROOMS = (kvplan, _executor)
HELPERS = {
    "np": np,
    "DESC": contents.DESC,
    "footprint": footprint.footprint,
    "link_of": states.link_of,
    "make_cache": contents.make_cache,
    "pattern": contents.pattern,
    "wait_for_state": states.wait_for_state,
}


def main() -> None:
    names = {name: getattr(room, name) for room in ROOMS for name in room.__all__} | HELPERS
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
