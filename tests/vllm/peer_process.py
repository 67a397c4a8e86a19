"""The names that snippets in a `Peer` can use: the prefilling worker."""

from typing import Any

import numpy as np

from tests.datadist.states import whole
from tests.vllm.contexts import Sizes, Workers
from tests.vllm.hybrid import HybridWorker
from tests.vllm.worker import VllmWorker


def names() -> dict[str, Any]:
    return {
        "np": np,
        "VllmWorker": VllmWorker,
        "HybridWorker": HybridWorker,
        "whole": whole,
        "Sizes": Sizes,
        "Workers": Workers,
    }
