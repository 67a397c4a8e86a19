"""Connectors on the stand-ins of vLLM's modules, for programs of tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import monotonic
from types import SimpleNamespace as Of
from typing import Any, ClassVar, cast

import numpy as np

from tests.vllm.pretended import install
from tests.vllm.worker import CpuTensor

VLLM = install()
BLOCKS, BLOCK_TOKENS = 8, 32
DEADLINE_S = 60.0
RANKS = Of(tensor=0, tensors=1, stage=0, copy=0)
"""The place of this process among vLLM's workers."""
LAYERS = [f"model.layers.{number}.attn" for number in range(2)]
PROMPT = list(range(1000, 1070))  # 70 tokens: blocks of 32, 32 and 6


class Base:
    """The methods of vLLM's base class that the connector calls."""

    def __init__(self, config: Any, _role: object, caches: Any) -> None:
        self._kv_transfer_config, self._kv_cache_config = config.kv_transfer_config, caches

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


class Metric:
    """A counter or a histogram: the sum of what each combination of labels got."""

    made: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, labelnames: Sequence[str], **_: object) -> None:
        self.labelnames, self.values = labelnames, dict[tuple[object, ...], float]()
        Metric.made[name.removeprefix("vllm:kvplan_")] = self

    def labels(self, *values: object) -> Of:
        assert len(values) == len(self.labelnames)
        self.values.setdefault(values, 0)

        def add(value: float) -> None:
            self.values[values] += value

        return Of(inc=add, observe=add)


class Metrics:
    """The fields of vLLM's KVConnectorPromMetrics that the connector uses."""

    def __init__(self, _config: Any, _types: Any, names: Any, values: Any) -> None:
        self._labelnames, self.per_engine_labelvalues = names, values
        self._counter_cls = self._histogram_cls = Metric


def replace(path: str, **values: object) -> None:
    for name, value in values.items():
        setattr(sys.modules[f"vllm.{path}"], name, value)


replace(
    "distributed",
    get_pcp_group=lambda: Of(rank_in_group=RANKS.copy),
    get_pp_group=lambda: Of(rank_in_group=RANKS.stage),
    get_tensor_model_parallel_rank=lambda: RANKS.tensor,
    get_tensor_model_parallel_world_size=lambda: RANKS.tensors,
)
replace(
    "distributed.kv_transfer.kv_connector.v1.base",
    KVConnectorBase_V1=Base,
    KVConnectorRole=Of(SCHEDULER="scheduler", WORKER="worker"),
    KVConnectorTransferResults=Of,
)
replace("distributed.kv_transfer.kv_connector.v1.metrics", KVConnectorPromMetrics=Metrics)
replace("v1.core.kv_cache_utils", generate_block_hash_extra_keys=lambda *_: ((), 0))
replace("distributed.utils", get_pp_indices=lambda layers, stage, _: (stage, stage + 1))
replace("platforms", current_platform=Of(device_type="cuda"))

from kvplan.vllm.connector import KvplanConnector  # noqa: E402


def spec(kind: str, **fields: object) -> Any:
    """Return the description of a layer's cache."""
    made = VLLM[kind]()
    vars(made).update({"block_size": BLOCK_TOKENS} | fields)
    return made


def parallel(**sizes: int) -> Any:
    """Return vLLM's configuration of parallel workers: one, except for `sizes`."""
    one = ("pipeline", "decode_context", "prefill_context", "tensor")
    found = {f"{name}_parallel_size": 1 for name in one}
    return Of(**found | {"data_parallel_index": 0, "cp_kv_cache_interleave_size": 1} | sizes)


def connector(
    role: str, *, produces: bool, sizes: Any = None, use_mla: bool = False
) -> KvplanConnector:
    """Return a connector for a model of two layers and two heads."""
    model = Of(
        model="tiny",
        use_mla=use_mla,
        get_total_num_kv_heads=lambda: 2,
        get_total_num_hidden_layers=lambda: 2,
    )
    transfers = Of(
        kv_connector_extra_config={},
        engine_id="producer" if produces else "consumer",
        is_kv_producer=produces,
        is_kv_consumer=not produces,
    )
    config: Any = Of(
        kv_transfer_config=transfers, model_config=model, parallel_config=sizes or parallel()
    )
    group = Of(layer_names=LAYERS, kv_cache_spec=spec("FullAttentionSpec"))
    caches: Any = Of(num_blocks=BLOCKS, kv_cache_groups=[group])
    return KvplanConnector(config, cast("Any", role), caches)


class Engine:
    """An engine of vLLM: a connector in its scheduler, and one in its worker."""

    def __init__(self, *, produces: bool) -> None:
        self.arrays = [np.zeros((BLOCKS, 2, BLOCK_TOKENS, 8), np.float32) for _ in LAYERS]
        self.scheduler, self.worker = (
            connector(role, produces=produces) for role in ("scheduler", "worker")
        )
        tensors = [CpuTensor(array) for array in self.arrays]
        given: Any = dict(zip(LAYERS, tensors, strict=True))
        self.worker.register_kv_caches(given)
        if (address := self.worker.get_handshake_metadata()) is not None:
            self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): address})

    def step(self) -> Any:
        """Let vLLM make a step that computes nothing, and return the step."""
        planned: Any = Of(
            kv_connector_block_state=None, preempted_req_ids=None, num_scheduled_tokens={}
        )
        metadata: Any = self.scheduler.build_connector_meta(planned)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(Of(attn_metadata=None))
        return metadata.step

    def finish(self, name: str, blocks: list[int]) -> dict[str, Any]:
        """Let a request finish, and return its parameters."""
        finished = request(name, {"do_remote_decode": True})
        self.scheduler.on_new_request(finished)
        _, params = self.scheduler.request_finished(finished, blocks)
        assert params is not None
        self.step()
        return params

    def fetch(self, name: str, params: dict[str, Any], blocks: list[int]) -> tuple[Any, Any]:
        """Fetch a request into blocks; return the answer to vLLM, and the results."""
        arrived = request(name, params)
        self.scheduler.on_new_request(arrived)
        answer = self.scheduler.get_num_new_matched_tokens(arrived, 0)
        given: Any = Of(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(arrived, given, len(PROMPT))
        self.step()
        return answer, self.results("finished_recving")

    def results(self, wanted: str) -> Any:
        """Repeat idle steps until one has wanted results, which the scheduler gets, too."""
        deadline = monotonic() + DEADLINE_S
        while not getattr(results := self.worker.get_transfer_results(set()), wanted):
            assert monotonic() < deadline, wanted
            self.step()
        self.scheduler.update_connector_output(results)
        return results


def request(name: str, params: dict[str, Any]) -> Any:
    return Of(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=len(PROMPT),
        status=Of(name="FINISHED_LENGTH_CAPPED"),
        lora_request=None,
        prompt_embeds=None,
        cache_salt=None,
        mm_features=[],
    )
