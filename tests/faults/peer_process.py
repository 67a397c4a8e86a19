"""An engine in a process of its own, told what to do line by line: see `serve`."""

import sys

import numpy as np

import kvplan
from kvnative import _executor
from tests.faults import contents, footprint, states
from tests.support import wrappers
from tests.support.over_tcp import engine_of
from tests.transport.owner_process import serve

ROOMS = (kvplan, _executor, wrappers)
HELPERS = {
    "np": np,
    "DESC": contents.DESC,
    "footprint": footprint.footprint,
    "link_of": states.link_of,
    "make_cache": contents.make_cache,
    "pattern": contents.pattern,
    "wait_for_state": states.wait_for_state,
}


if __name__ == "__main__":
    engine = {"LlmDataDist": engine_of(sys.argv[1])}
    serve({name: getattr(room, name) for room in ROOMS for name in room.__all__} | HELPERS | engine)
