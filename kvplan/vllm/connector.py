"""`KvplanConnector`, which vLLM calls. Each method calls the half that runs in its process."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvplan.serving.messages import LayerRange
from kvplan.vllm.options import ConnectorOptions
from kvplan.vllm.scheduler import ConnectorScheduler, instance_of
from kvplan.vllm.states import StateForm
from kvplan.vllm.stats import KvplanMetrics, KvplanStats
from kvplan.vllm.step import Step, WorkerAddress
from kvplan.vllm.worker import ConnectorWorker, LayerGroup, Model, place_of

_SUPPORTED = {FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec}  # no subclasses
_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")  # names of Mamba2's number of groups


@dataclass
class KvplanMetadata(KVConnectorMetadata):
    """A step, which vLLM sends from the scheduler to the workers."""

    step: Step


@dataclass
class KvplanHandshake(KVConnectorHandshakeMetadata):
    """The address of a worker, which vLLM sends to the scheduler."""

    address: WorkerAddress


class KvplanConnector(KVConnectorBase_V1, SupportsHMA):
    """Disaggregated prefill over kvplan: a decoding engine fetches the KV cache of a prompt.

    Args:
        vllm_config: its kv_transfer_config has `kv_connector_extra_config` (docs/how-to/vllm.md).
        role: scheduler or worker.
        kv_cache_config: configuration of the paged cache.

    Raises:
        NotImplementedError: layers other than full attention, sliding windows, MLA and states of
            Mamba and linear attention; pipeline parallelism with several groups of layers; decode
            context parallelism except with one group of full attention or MLA; sleep mode.
        TypeError, LLMException: invalid options.
    """

    _cache_hit_source = CacheHitSource.P2P  # for vLLM's metrics

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_supported(vllm_config, kv_cache_config)
        options = ConnectorOptions.of(self._kv_transfer_config.kv_connector_extra_config)
        _log_like_vllm(options.explain)
        engine_id = self._kv_transfer_config.engine_id or ""
        groups = tuple(_layer_group(of, vllm_config) for of in kv_cache_config.kv_cache_groups)
        self._failed_blocks: set[int] = set()
        self._is_idle = False
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = ConnectorScheduler(
                engine_id,
                windowed=any(group.window for group in groups),
                states=[group.block_tokens if group.states else 0 for group in groups],
                count_keys=_count_keys,
            )
        else:
            config, parallel = vllm_config.model_config, vllm_config.parallel_config
            rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            stage, stages = get_pp_group().rank_in_group, parallel.pipeline_parallel_size
            copies = parallel.prefill_context_parallel_size
            copy = get_pcp_group().rank_in_group if copies > 1 else 0
            num_heads = 1 if config.use_mla else config.get_total_num_kv_heads()
            replica = parallel.data_parallel_index
            model = Model(
                name=options.model or config.model,
                num_heads=num_heads,
                place=place_of(
                    (rank, ranks),
                    (copy, copies),
                    (
                        parallel.decode_context_parallel_size,
                        parallel.cp_kv_cache_interleave_size,  # also set by its older name
                    ),
                    num_heads=num_heads,
                    stage=stage,
                    stages=_stages(config.get_total_num_hidden_layers(), stages),
                ),
                worker=((replica * stages + stage) * copies + copy) * ranks + rank,
                num_blocks=kv_cache_config.num_blocks,
                groups=groups,
                produces=self._kv_transfer_config.is_kv_producer,
                consumes=self._kv_transfer_config.is_kv_consumer,
            )
            self._worker = ConnectorWorker(instance_of(engine_id), model, options)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False: sleep mode replaces the memory of the registered cache."""
        return False

    # Called in the scheduler.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Store the addresses of the workers, by stage and rank."""
        self._in_scheduler.set_workers(
            {
                place: handshake.address
                for place, handshake in metadata.items()
                if isinstance(handshake, KvplanHandshake)
            }
        )

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return all groups: the blocks of a request in each of them are fetched."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def on_new_request(self, request: Request) -> None:
        """Take a request that has arrived."""
        self._in_scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be fetched, and True if that happens between steps."""
        missing = self._in_scheduler.missing_tokens(request, num_computed_tokens)
        return missing, missing > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take the blocks into which a request is fetched."""
        self._in_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step for the workers."""
        scheduler, state = self._in_scheduler, scheduler_output.kv_connector_block_state

        def blocks_of(request: str) -> list[int] | None:
            blocks = None if state is None else state.get_block_ids(request)
            return None if blocks is None else blocks[0]

        scheduler.preempted(scheduler_output.preempted_req_ids or ())
        scheduler.computing(scheduler_output.num_scheduled_tokens, blocks_of)
        return KvplanMetadata(scheduler.take_step())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the reports of the workers."""
        self._in_scheduler.fetched(connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return True if the blocks are kept for a consumer, and the parameters for it."""
        return self._in_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the same as `request_finished`, for blocks in several groups of layers."""
        return self._in_scheduler.finished(request, block_ids)

    # Called in a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache of this worker."""
        self._in_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the address of this worker."""
        address = self._in_worker.address
        return None if address is None else KvplanHandshake(address)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the parts of a step that do not depend on its computation."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, KvplanMetadata):
            self._worker.prepare(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the other parts of the step."""
        self._is_idle = getattr(forward_context, "attn_metadata", None) is None
        metadata = self._get_connector_metadata()
        if isinstance(metadata, KvplanMetadata):
            self._in_worker.begin(metadata.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs after all of its layers were fetched."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Push a computed layer to consumers that wait for it."""
        self._in_worker.layer_ready(layer_name)

    def wait_for_save(self) -> None:
        """End the pushes of a step without waiting: blocks are kept until they have moved."""
        self._in_worker.computed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests that were fetched or failed, and those whose blocks are free."""
        results = self._in_worker.results(idle=self._is_idle)
        self._failed_blocks |= results.failed_blocks
        return KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of failed requests. vLLM computes them, or fails the request."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the figures since the last call; None without figures, and in the scheduler."""
        if self._worker is None or (figures := self._worker.take_figures()).is_empty:
            return None
        return KvplanStats(figures.data)

    # Called in the process of the server.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return figures of workers from plain data."""
        return KvplanStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return the metrics of a server."""
        return KvplanMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the worker's half."""
        if self._worker is not None:
            self._worker.close()

    @property
    def _in_scheduler(self) -> ConnectorScheduler:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler

    @property
    def _in_worker(self) -> ConnectorWorker:
        assert self._worker is not None, "called in the scheduler"
        return self._worker


def _stages(num_layers: int, stages: int) -> tuple[LayerRange | None, ...]:
    """Return the layers of each stage of a pipeline; None: the only stage has all layers."""
    if stages == 1:
        return (None,)
    return tuple(get_pp_indices(num_layers, stage, stages) for stage in range(stages))


def _count_keys(request: Request, num_tokens: int) -> int:
    """Return how many keys, other than tokens, vLLM's prefix cache has for a prefix."""
    keys, _ = generate_block_hash_extra_keys(request, 0, num_tokens, 0)
    return len(keys or ())


def _layer_group(group: KVCacheGroupSpec, config: VllmConfig) -> LayerGroup:
    spec = group.kv_cache_spec
    states = isinstance(spec, MambaSpec)
    return LayerGroup(
        layers=tuple(group.layer_names),
        block_tokens=spec.block_size * config.parallel_config.decode_context_parallel_size,
        packing="" if states else _packing(spec),
        window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
        states=_states(spec, config) if states else None,
    )


def _states(spec: MambaSpec, config: VllmConfig) -> StateForm:
    text = config.model_config.hf_text_config
    groups = [getattr(text, name) for name in _GROUPS if getattr(text, name, None)]
    return StateForm.of(
        spec,
        config.parallel_config.tensor_parallel_size,
        groups=groups[0] if groups else None,
        columns_first=is_conv_state_dim_first(),
    )


def _packing(spec: Any) -> str:
    """Return the order inside a block if attention on a CPU has its own; otherwise empty."""
    if current_platform.device_type != "cpu" or isinstance(spec, MLAAttentionSpec):
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(spec.dtype, spec.block_size, spec.head_size))


def _log_like_vllm(explain: bool) -> None:
    """Log to vLLM's handlers; lines for each request only with `explain`."""
    logger = logging.getLogger("kvplan.serving")
    logger.setLevel(logging.INFO if explain else logging.WARNING)
    for name in ("kvplan.serving", "kvplan.vllm"):
        ours = logging.getLogger(name)
        ours.propagate = False
        ours.handlers = logging.getLogger("vllm").handlers[:]
    logging.getLogger("kvplan.vllm").setLevel(logging.INFO)


def _check_supported(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Raise NotImplementedError for configurations that this connector does not support."""
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    kinds = set(map(type, specs))
    names = ", ".join(type(spec).__name__ for spec in specs)
    if not kinds or kinds - _SUPPORTED:
        raise NotImplementedError(
            f"KvplanConnector: the cache has {len(specs)} groups ({names}); only groups of full "
            "attention, of sliding windows, of MLA and of Mamba are supported"
        )
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise NotImplementedError(
            "KvplanConnector: enable_sleep_mode=True; sleep mode replaces the memory of the "
            "registered cache: start vLLM without it"
        )
    parallel = config.parallel_config
    if (ranks := parallel.decode_context_parallel_size) != 1 and (
        len(specs) > 1 or kinds - {FullAttentionSpec, MLAAttentionSpec}
    ):
        raise NotImplementedError(
            f"KvplanConnector: decode_context_parallel_size={ranks} must be 1 for a cache of "
            f"{len(specs)} groups ({names}); more is possible only with one group of full "
            "attention or MLA"
        )
    if (stages := parallel.pipeline_parallel_size) != 1 and len(specs) > 1:
        raise NotImplementedError(
            f"KvplanConnector: pipeline_parallel_size={stages} must be 1 for a cache of "
            f"{len(specs)} groups"
        )
