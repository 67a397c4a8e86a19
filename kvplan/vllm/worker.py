"""A worker's half of the connector: its cache, and the exchange of it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplan.engine.datadist import LlmDataDist
from kvplan.layout import Shard
from kvplan.logs import Log
from kvplan.serving import Compatibility, Exchange
from kvplan.serving.ranks import heads_of
from kvplan.status import LLMException, invalid
from kvplan.types import CacheDesc, LlmRole
from kvplan.vllm.figures import Figures
from kvplan.vllm.options import ConnectorOptions
from kvplan.vllm.step import Step, WorkerAddress

logger = Log("kvplan.vllm")

_NDIM = 4
_MOMENT_MS = 2.0  # that a new request may be late


@dataclass(frozen=True)
class Model:
    """What a worker has to know of the model and of itself.

    Attributes:
        name: that both sides agree on.
        num_heads: KV heads of the model.
        rank, ranks: under tensor parallelism.
        block_tokens: tokens of a block, as the scheduler counts them.
        num_blocks: of the cache.
        packing: how the processor's attention orders what is inside of a block.
        produces, consumes: which of both this engine is.
    """

    name: str
    num_heads: int
    rank: int
    ranks: int
    block_tokens: int
    num_blocks: int
    packing: str
    produces: bool
    consumes: bool


@dataclass(frozen=True)
class Results:
    """What has ended since the last step; requests by their ids."""

    sent: set[str]
    received: set[str]
    failed_blocks: set[int]


class ConnectorWorker:
    """Lives in a worker of vLLM, from `register` to `close`.

    Args:
        instance: of the engine, as the scheduler's half has it.
    """

    def __init__(self, instance: bytes, model: Model, options: ConnectorOptions) -> None:
        self._instance = instance
        self._model = model
        self._options = options
        self._engine: LlmDataDist | None = None
        self._exchange: Exchange | None = None
        self._figures = Figures()
        self._expired = 0
        self._on_host = True

    def register(self, layers: Mapping[str, Any]) -> None:
        """Take the cache that vLLM has allocated: a tensor for each layer.

        Raises:
            LLMException: LLM_PARAM_INVALID: tensors that are no paged cache of one kind, or with
                gaps; what the engine's options cannot be.
        """
        model, options = self._model, self._options
        names = sorted(layers, key=_position)
        tensors, layout, unit = readable([layers[name] for name in names])
        self._on_host = tensors[0].device.type == "cpu"
        shard = Shard(
            layers=range(len(names)),
            heads=heads_of(model.rank, model.ranks, model.num_heads),
            num_layers=len(names),
            num_heads=model.num_heads,
        )
        desc = CacheDesc.from_tensors(tensors, layout, shard=shard)
        tokens = desc.shape[desc.seq_len_dim_index] * unit
        if (desc.batch_size, tokens) != (model.num_blocks, model.block_tokens):
            raise invalid(
                f"the cache has {desc.batch_size} blocks of {tokens} tokens; the scheduler has "
                f"{model.num_blocks} of {model.block_tokens}"
            )
        roles = LlmRole.MIX if model.consumes else LlmRole.PROMPT
        # As many bits as each JSON library keeps: it travels with requests.
        engine = LlmDataDist(
            secrets.randbelow(2**53 - 1) + 1, roles if model.produces else LlmRole.DECODER
        )
        given = dict(options.engine)
        if model.produces:
            given.setdefault("llm.ListenIpInfo", options.listen_of(model.rank))
        engine.initialize(given)
        try:
            cache = engine.register_blocks_cache(desc, tensors)
            self._exchange = Exchange(
                engine,
                cache,
                compatibility(model, desc, len(names), unit),
                self._instance,
                rank=model.rank,
                ranks=model.ranks,
                num_heads=model.num_heads,
                token_unit=unit,
                options=options.exchange,
            )
        except BaseException:
            engine.finalize()
            raise
        self._engine = engine
        logger.info(
            "worker %d of %d: %d layers of %s %s, %s",
            model.rank,
            model.ranks,
            len(names),
            desc.data_type.name,
            desc.shape,
            f"at {engine.listen_address}" if model.produces else "not listening",
        )

    @property
    def exchange(self) -> Exchange:
        """Of its cache.

        Raises:
            LLMException: LLM_FAILED: `register` was not called.
        """
        if self._exchange is None:
            raise LLMException("the connector has no cache: register_kv_caches was not called")
        return self._exchange

    @property
    def address(self) -> WorkerAddress | None:
        """Where consumers reach this worker; None: nowhere."""
        if self._engine is None or self._engine.listen_address is None:
            return None
        return WorkerAddress(self._engine.cluster_id, self._engine.listen_address)

    def prepare(self, step: Step) -> None:
        """Do what need not wait for the step's computation; nothing of it is waited for.

        A consumer may be waiting for an offer, and a step can take seconds. Blocks are written when
        vLLM has cleared them: where the host computes, that is so already; elsewhere in `begin`.
        """
        exchange = self.exchange
        self._figures.count("offered", len(step.offers))
        for offer in step.offers:
            exchange.enter(offer.sequence, offer.request, offer.blocks, offer.digest)
        for request, reference in step.expected.items():
            exchange.expect(request, reference)
        for request, reference in step.dropped.items():
            exchange.drop(request, reference)
        if self._on_host:
            self._fetch(step)

    def begin(self, step: Step) -> None:
        """Do the rest: the step's computation is under way."""
        if not self._on_host:
            self._fetch(step)

    def _fetch(self, step: Step) -> None:
        for request, (reference, target) in step.fetched.items():
            self.exchange.fetch(request, reference, target)

    def results(self, *, idle: bool = False) -> Results:
        """What has ended since the last call.

        In an idle step, which computes nothing, it waits a moment for what is under way: vLLM goes
        on with such steps at once, and would keep the interpreter from those who fetch.
        """
        exchange = self.exchange
        if idle and exchange.is_fetching:
            exchange.wait(_MOMENT_MS)
        received: set[str] = set()
        failed: set[int] = set()
        for it in exchange.take_results():
            received.add(it.request)
            self._figures.ended(it)
            if it.error is not None:
                failed.update(it.blocks[it.first_token // self._model.block_tokens :])
        freed, expired = exchange.take_freed(), exchange.book.expired
        self._figures.count("freed", len(freed))
        self._figures.count("expired", expired - self._expired)
        self._expired = expired
        return Results(freed, received, failed)

    def take_figures(self) -> Figures:
        """What has happened since the last call."""
        figures, self._figures = self._figures, Figures()
        return figures

    def close(self) -> None:
        """End the exchange and the engine; idempotent."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self._engine is not None:
            self._engine.finalize()
            self._engine = None


def readable(tensors: Sequence[Any]) -> tuple[list[Any], str, int]:
    """Show each layer's tensor as it is used, with its axes, and how many tokens are one.

    vLLM shows a layer as (block, head, token, keys and values), and its strides say how that lies.
    On CPUs the keys of a block's head come before its values, and in an order of the processor's
    own, in which no token is in one place: a block moves whole.
    """
    if any(getattr(it, "ndim", 0) != _NDIM for it in tensors) or not tensors:
        raise invalid(f"a cache of {len(tensors)} layers must have tensors of {_NDIM} dimensions")
    if tensors[0].device.type != "cpu":
        return list(tensors), "block head token dim", 1
    blocks, heads, tokens, both = tensors[0].shape
    shape = (blocks, heads, 2, 1, tokens * both // 2)
    return [it.view(shape) for it in tensors], "block head kv token dim", tokens


def compatibility(model: Model, desc: CacheDesc, layers: int, unit: int) -> Compatibility:
    """What has to be the same at the producer; numbers of workers and block sizes need not."""
    return Compatibility(
        {
            "connector": "kvplan.vllm 1",
            "model": model.name,
            "dtype": desc.data_type.name,
            "layers": str(layers),
            "kv_heads": str(model.num_heads),
            "head_bytes": str(desc.shape[-1] * desc.data_type.bits // 8 // unit),
            "packing": f"{model.packing}, {unit} tokens",
        }
    )


def _position(name: str) -> tuple[list[int], str]:
    """Layers are in the order of their numbers, and not of their names."""
    return [int(it) for it in re.findall(r"\d+", name)], name
