"""vLLM's NixlConnector, which says what it hands over: `kvplan trace --sums` then has both ends.

A transfer of NIXL is the reader's: the observer of the owner sees nothing of the transfer. So the
owner records a sum of each block when a request is finished. Without an observer nothing happens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

import kvplan.observe
from kvplan.tensors.strided import pieces_of

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MISTAKE = "EXAMPLES_VLLM_MISTAKE"
"""Environment variable: a file; while there is one, layers are read from the one after each."""

if what := os.environ.get("KVPLAN_OBSERVE"):
    kvplan.observe.install_from(what)


class ObservedNixl(NixlPullConnector):
    """The scheduler says which blocks a finished request has; each worker records their sums."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._finished: dict[str, list[int]] = {}  # blocks of requests, since the last step

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, params = super().request_finished_all_groups(request, block_ids)
        if params and params.get("remote_block_ids"):
            (blocks,) = params["remote_block_ids"]
            self._finished[params["remote_request_id"]] = list(blocks)
        return held, params

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        vars(metadata)["finished"], self._finished = self._finished, {}
        return metadata

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        super().start_load_kv(*args, **kwargs)
        worker = self.connector_worker
        given = np.asarray(worker.src_blocks_data, np.uint64)
        # vLLM 0.33 gives a row for each region, with a stride and a count.
        rows = pieces_of(given).reshape(worker.num_regions, -1, 3)
        for request, blocks in vars(self._connector_metadata)["finished"].items():
            # Address, size and device of each block of each layer, in the order of transfers.
            kvplan.observe.sums(request, list(map(tuple, rows[:, blocks].reshape(-1, 3).tolist())))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if mistake := os.environ.get(MISTAKE):
            worker = self.connector_worker
            right = worker._compute_desc_ids

            def wrong(*args: Any, **kwargs: Any) -> Any:
                found = right(*args, **kwargs)
                if kwargs["block_size_ratio"] is None and Path(mistake).exists():  # at the owner
                    found = np.roll(found.reshape(worker.num_regions, -1), -1, axis=0).ravel()
                return found

            worker._compute_desc_ids = wrong
