"""The names that snippets in a `Peer` can use: kvplan's, wrappers, and helpers of this folder."""

from functools import partial
from typing import Any

import numpy as np

import kvplan
from kvnative import _backend, _executor, _task
from tests.faults import contents, footprint, states
from tests.support import wrappers
from tests.support.over_tcp import engine_of

ROOMS = (kvplan, _backend, _executor, _task, wrappers)
HELPERS = {
    "np": np,
    "DESC": contents.DESC,
    "footprint": footprint.footprint,
    "link_of": states.link_of,
    "make_cache": contents.make_cache,
    "pattern": contents.pattern,
    "wait_for_state": states.wait_for_state,
}


def names(machine: str) -> dict[str, Any]:
    known = {name: getattr(room, name) for room in ROOMS for name in room.__all__}
    here = {"LlmDataDist": engine_of(machine), "own": partial(contents.own, machine)}
    return known | HELPERS | here
