"""`KvplanConnector`, as vLLM calls it: each method hands over to the half that lives there."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
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
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvplan.vllm.options import ConnectorOptions
from kvplan.vllm.scheduler import ConnectorScheduler, instance_of
from kvplan.vllm.stats import KvplanMetrics, KvplanStats
from kvplan.vllm.step import Step, WorkerAddress
from kvplan.vllm.worker import ConnectorWorker, LayerGroup, Model

_SUPPORTED = {FullAttentionSpec, SlidingWindowSpec}  # and not what is derived of them, as MLA is


@dataclass
class KvplanMetadata(KVConnectorMetadata):
    """A step, as vLLM carries it from the scheduler to the workers."""

    step: Step


@dataclass
class KvplanHandshake(KVConnectorHandshakeMetadata):
    """A worker's address, as vLLM carries it to the scheduler."""

    address: WorkerAddress


class KvplanConnector(KVConnectorBase_V1, SupportsHMA):
    """Disaggregated prefill over kvplan: the decoding engine fetches what the other has computed.

    Args:
        vllm_config: its kv_transfer_config has `kv_connector_extra_config` (docs/how-to/vllm.md).
        role: which half this is.
        kv_cache_config: of the paged cache.

    Raises:
        NotImplementedError: a model with layers of another kind than full attention and sliding
            windows; pipeline or context parallelism.
        TypeError, LLMException: options that cannot be.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_supported(vllm_config, kv_cache_config)
        options = ConnectorOptions.of(self._kv_transfer_config.kv_connector_extra_config)
        _log_like_vllm(options.explain)
        engine_id = self._kv_transfer_config.engine_id or ""
        groups = tuple(_layer_group(it) for it in kv_cache_config.kv_cache_groups)
        self._failed_blocks: set[int] = set()
        self._is_idle = False
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = ConnectorScheduler(
                engine_id, windowed=any(it.window for it in groups), count_keys=_count_keys
            )
        else:
            config = vllm_config.model_config
            model = Model(
                name=options.model or config.model,
                num_heads=config.get_total_num_kv_heads(),
                rank=get_tensor_model_parallel_rank(),
                ranks=get_tensor_model_parallel_world_size(),
                num_blocks=kv_cache_config.num_blocks,
                groups=groups,
                produces=self._kv_transfer_config.is_kv_producer,
                consumes=self._kv_transfer_config.is_kv_consumer,
            )
            self._worker = ConnectorWorker(instance_of(engine_id), model, options)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """False: in sleep mode vLLM maps other memory where the registered cache was."""
        return False

    # In the scheduler.

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn where consumers reach the workers."""
        self._in_scheduler.set_workers(
            {rank: it.address for rank, it in metadata.items() if isinstance(it, KvplanHandshake)}
        )

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        self._in_scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be fetched; that is between steps."""
        missing = self._in_scheduler.missing_tokens(request, num_computed_tokens)
        return missing, missing > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has blocks for what is fetched."""
        self._in_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers do with this step."""
        scheduler, state = self._in_scheduler, scheduler_output.kv_connector_block_state

        def blocks_of(request: str) -> list[int] | None:
            blocks = None if state is None else state.get_block_ids(request)
            return None if blocks is None else blocks[0]

        scheduler.preempted(scheduler_output.preempted_req_ids or ())
        scheduler.computing(scheduler_output.num_scheduled_tokens, blocks_of)
        return KvplanMetadata(scheduler.take_step())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers have reported."""
        self._in_scheduler.fetched(connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept for a consumer, and what it has to be given."""
        return self._in_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, which vLLM does not call where it has groups of caches."""
        return self._in_scheduler.finished(request, block_ids)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the cache of this worker."""
        self._in_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Where consumers reach this worker."""
        address = self._in_worker.address
        return None if address is None else KvplanHandshake(address)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin what the scheduler said with this step, before it computes."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, KvplanMetadata):
            self._worker.prepare(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin what must not come before that."""
        self._is_idle = getattr(forward_context, "attn_metadata", None) is None
        metadata = self._get_connector_metadata()
        if isinstance(metadata, KvplanMetadata):
            self._in_worker.begin(metadata.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: requests run when all of their layers are here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer is computed: it is pushed where a consumer waits for it."""
        self._in_worker.layer_ready(layer_name)

    def wait_for_save(self) -> None:
        """The model has run; nothing is waited for, as blocks are kept until they have moved."""
        self._in_worker.computed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Which requests have been fetched, whether or not that failed, and which are free."""
        results = self._in_worker.results(idle=self._is_idle)
        self._failed_blocks |= results.failed_blocks
        return KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of requests that failed: vLLM computes them, or fails the request."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What has happened since the last call; None: nothing, as always in the scheduler."""
        if self._worker is None or (figures := self._worker.take_figures()).is_empty:
            return None
        return KvplanStats(figures.data)

    # In the process of the server.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Figures of workers, which have come as plain data."""
        return KvplanStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """What a server shows of them."""
        return KvplanMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End what this half has."""
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


def _count_keys(request: Request, num_tokens: int) -> int:
    """How many keys vLLM's prefix cache has for the first tokens of a request, besides these."""
    keys, _ = generate_block_hash_extra_keys(request, 0, num_tokens, 0)
    return len(keys or ())


def _layer_group(group: KVCacheGroupSpec) -> LayerGroup:
    spec = group.kv_cache_spec
    return LayerGroup(
        layers=tuple(group.layer_names),
        block_tokens=spec.block_size,
        packing=_packing(spec),
        window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
    )


def _packing(spec: Any) -> str:
    """How attention orders what is inside of a block, where that is its own matter."""
    if current_platform.device_type != "cpu":
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(spec.dtype, spec.block_size, spec.head_size))


def _log_like_vllm(explain: bool) -> None:
    """Let what kvplan says stand in vLLM's log; of each request only if that is wanted."""
    logger = logging.getLogger("kvplan.serving")
    logger.setLevel(logging.INFO if explain else logging.WARNING)
    for name in ("kvplan.serving", "kvplan.vllm"):
        it = logging.getLogger(name)
        it.propagate = False
        it.handlers = logging.getLogger("vllm").handlers[:]
    logging.getLogger("kvplan.vllm").setLevel(logging.INFO)


def _check_supported(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Refuse what this connector has not."""
    specs = [it.kv_cache_spec for it in caches.kv_cache_groups]
    kinds = {type(it) for it in specs}
    if not kinds or kinds - _SUPPORTED:
        names = ", ".join(type(it).__name__ for it in specs)
        raise NotImplementedError(
            f"KvplanConnector: a cache of {len(specs)} groups ({names}); groups of full attention "
            "and of sliding windows are supported"
        )
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise NotImplementedError(
            "KvplanConnector: enable_sleep_mode=True; sleep mode maps other memory where the "
            "registered cache was: start vLLM without it"
        )
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise NotImplementedError(f"KvplanConnector: {name}={getattr(parallel, name)}; not 1")
