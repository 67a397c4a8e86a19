"""Two linked devices of a product in a process of their own; prints results as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys

import numpy as np

import kvplan
from kvplan.status import LLMException
from tests.ascend.hccl_side import (
    BLOCK,
    BLOCKS,
    PULL,
    PUSH,
    TENSOR,
    TENSORS,
    Side,
    link_both,
    moved,
)
from tests.ascend.simulator import controls, found


def shown(variant: str) -> dict[str, object]:
    one, two = Side(0), Side(1, registers=False)
    ours, theirs = one.fill(1), two.fill(2)
    link, _ = link_both(one, two)
    report = {
        "product": one.transport._product.name,
        "version": one.transport._address.version,
        "reaches": sorted(one.transport.reaches),
        "variant": variant,
    }
    later = two.register()  # later than the link
    remote = two.peer_memory(link, writable=True, metadata=two.transport.metadata())
    kvplan.execute(PULL, remote, one.memory)
    report["pulled"] = bool((one.seen == moved(theirs, ours)).all())
    ours = one.seen.copy()
    kvplan.execute(PUSH, one.memory, remote)
    report["pushed"] = bool((two.seen == moved(ours, theirs)).all())
    host = np.zeros((TENSORS, BLOCKS, BLOCK), np.uint8)
    theirs = two.seen.copy()
    kvplan.execute(PULL, remote, list(host))
    report["pulled to the host"] = bool((host == moved(theirs, np.zeros_like(host))).all())
    report["generation"] = link.connection().generation
    arena = two.transport.allocate(TENSOR)
    try:
        two.transport.register(arena)
        report["host memory"] = "registered"
    except (TypeError, LLMException) as error:
        report["host memory"] = str(error)
    two.transport.deregister(later)
    try:
        kvplan.execute(PULL, remote, one.memory)
    except LLMException as error:
        report["deregistered"] = error.status_code.name
    link.close()
    del link, _, remote, arena
    for end in (one, two):
        end.close()
    return report


if __name__ == "__main__":
    variant = sys.argv[1]
    assert os.environ["KVSIM_DIR"]
    with found(variant):
        result = shown(variant)
        gc.collect()
        result["left"] = controls(variant).left()
    sys.stdout.write(json.dumps(result))
