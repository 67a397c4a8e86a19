"""A worker's half of the connector: its cache, and the exchange of it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.options import Options
from kvplan.layout import Shard
from kvplan.planning.plan import MAX_NAME
from kvplan.serving import CacheGroup, Compatibility, Exchange, Handle
from kvplan.serving.tables import heads_of, tables_of
from kvplan.status import LLMException, invalid
from kvplan.system.logs import Log
from kvplan.types import CacheDesc, LlmRole
from kvplan.vllm.options import ConnectorOptions
from kvplan.vllm.step import Figures, Step, WorkerAddress

logger = Log("kvplan.vllm")

_NDIM = 4
_MOMENT_MS = 2.0  # that a new request may be late


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table.

    Attributes:
        layers: their names.
        block_tokens: tokens of a block, as the scheduler counts them.
        packing: how the processor's attention orders what is inside of a block; empty: as the shape
            of the tensors says.
        window: the last tokens that attention sees; 0: all.
    """

    layers: tuple[str, ...]
    block_tokens: int
    packing: str = ""
    window: int = 0


@dataclass(frozen=True)
class Model:
    """What a worker has to know of the model and of itself.

    Attributes:
        name: that both sides agree on.
        num_heads: KV heads of the model.
        rank, ranks: under tensor parallelism.
        num_blocks: of the cache.
        groups: its layers.
        produces, consumes: which of both this engine is.
    """

    name: str
    num_heads: int
    rank: int
    ranks: int
    num_blocks: int
    groups: tuple[LayerGroup, ...]
    produces: bool
    consumes: bool

    @property
    def simple(self) -> bool:
        """Whether a request has all its blocks in one table."""
        return len(self.groups) == 1 and not self.groups[0].window


@dataclass(frozen=True)
class _View:
    """The cache of a group, as kvplan has it.

    Attributes:
        names, tensors: of its layers, in the order of the model.
        unit: how many tokens are one.
    """

    group: LayerGroup
    names: list[str]
    tensors: list[Any]
    desc: CacheDesc
    unit: int

    def __str__(self) -> str:
        numbers = "+".join(str(it) for name in self.names for it in _position(name)[0][:1])
        return f"layers {numbers}"[:MAX_NAME]

    def fields(self, model: Model) -> dict[str, str]:
        """What the producer's group has to be like."""
        group, desc = self.group, self.desc
        fields = {
            "dtype": desc.data_type.name,
            "layers": str(len(self.names)),
            "kv_heads": str(model.num_heads),
            "head_bytes": str(desc.shape[-1] * desc.data_type.bits // 8 // self.unit),
            "packing": f"{group.packing or 'plain'}, {self.unit} tokens",
        }
        if group.window:  # whose blocks are left is said in blocks
            fields["attention"] = f"window of {group.window} tokens, blocks of {group.block_tokens}"
        return fields


@dataclass(frozen=True)
class Results:
    """What has ended since the last step; requests by their ids.

    Attributes:
        received: whether or not that failed.
        failed: that have to be computed from their first token on.
        failed_blocks: of others, the blocks that have to be computed.
    """

    sent: set[str]
    received: set[str]
    failed: set[str]
    failed_blocks: set[int]


class ConnectorWorker:
    """Lives in a worker of vLLM, from `register` to `close`."""

    def __init__(self, instance: bytes, model: Model, options: ConnectorOptions) -> None:
        self._instance = instance
        self._model = model
        self._options = options
        self._layers: dict[str, int] = {}
        self._engine: LlmDataDist | None = None
        self._exchange: Exchange | None = None
        self._figures = Figures()
        self._expired = 0
        self._offered: dict[Handle, str] = {}  # requests whose blocks are kept
        self._on_host = True

    def register(self, layers: Mapping[str, Any]) -> None:
        """Take the cache that vLLM has allocated: a tensor for each layer."""
        model, options = self._model, self._options
        views = [self._view(it, layers) for it in model.groups]
        names = [name for it in views for name in it.names]
        self._layers = {name: index for index, name in enumerate(names)}
        device = layers[names[0]].device
        self._on_host = device.type == "cpu"
        if options.mode == "push":
            self._check_push(device.type)
        roles = LlmRole.MIX if model.consumes else LlmRole.PROMPT
        # As many bits as each JSON library keeps: it travels with requests.
        engine = LlmDataDist(
            secrets.randbelow(2**53 - 1) + 1, roles if model.produces else LlmRole.DECODER
        )
        given = dict(options.engine)
        if model.produces:
            given.setdefault("llm.ListenIpInfo", options.listen_of(model.rank))
        settings = Options.of(given)
        if not self._on_host:  # a worker's cache is on the device of its rank
            settings = replace(settings, device_id=device.index)
        engine.initialize(settings)
        try:
            groups = [
                CacheGroup(str(it), engine.register_blocks_cache(it.desc, it.tensors), it.unit)
                for it in views
            ]
            self._exchange = Exchange(
                engine,
                groups if len(groups) > 1 else groups[0].cache,
                compatibility(model, views),
                self._instance,
                rank=model.rank,
                ranks=model.ranks,
                num_heads=model.num_heads,
                push=options.mode == "push",
                token_unit=views[0].unit,
                options=options.exchange,
            )
        except BaseException:
            engine.finalize()
            raise
        self._engine = engine
        logger.info(
            "worker %d of %d: %d layers, %s, %s",
            model.rank,
            model.ranks,
            len(names),
            "; ".join(map(str, views)),
            f"at {engine.listen_address}" if model.produces else "not listening",
        )

    def _view(self, group: LayerGroup, layers: Mapping[str, Any]) -> _View:
        model = self._model
        if absent := [it for it in group.layers if it not in layers]:
            raise invalid(f"layer {absent[0]} has no tensor")
        names = sorted(group.layers, key=_position)
        tensors, layout, unit = readable([layers[it] for it in names], packed=bool(group.packing))
        shard = Shard(
            layers=range(len(names)),
            heads=heads_of(model.rank, model.ranks, model.num_heads),
            num_layers=len(names),
            num_heads=model.num_heads,
        )
        desc = CacheDesc.from_tensors(tensors, layout, shard=shard)
        tokens = desc.shape[desc.seq_len_dim_index] * unit
        if (desc.batch_size, tokens) != (model.num_blocks, group.block_tokens):
            raise invalid(
                f"the cache has {desc.batch_size} blocks of {tokens} tokens; the scheduler has "
                f"{model.num_blocks} of {group.block_tokens}"
            )
        return _View(group, names, tensors, desc, unit)

    def _check_push(self, device: str) -> None:
        if not self._on_host:
            raise invalid(
                'mode="push" needs a cache in host memory; elsewhere a layer is not computed when '
                f'vLLM says so, and this one is on {device}: use mode="pull"'
            )
        if not self._model.simple:
            raise invalid(
                'mode="push" needs layers that all see all tokens, and some of these have a '
                'sliding window: use mode="pull"'
            )

    @property
    def exchange(self) -> Exchange:
        """Of its cache."""
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
        What the step overwrites is not pushed any more on return.
        """
        exchange = self.exchange
        self._figures.count("offered", len(step.offers))
        if step.chunks or step.moved:
            exchange.begin_step(step.chunks, step.moved)
        for it in step.offers:
            self._offered[it.handle] = it.request
            exchange.enter(it.request, it.blocks, it.digest, it.transfer, handle=it.handle)
        for transfer in step.refused:
            exchange.refuse(transfer, "was not finished by its producer")
        for request, reference in step.expected.items():
            exchange.expect(request, reference)
        for request, reference in step.dropped.items():
            exchange.drop(request, reference)
        for request in step.cancelled:
            exchange.cancel(request)
        if self._on_host:
            self._fetch(step)

    def layer_ready(self, layer: str) -> None:
        """A layer of the step is computed."""
        if (index := self._layers.get(layer)) is not None:  # others have no tensors of their own
            self.exchange.layer_ready(index)

    def computed(self) -> None:
        """All layers of the step are computed."""
        self.exchange.end_step()

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
        failed: set[str] = set()
        failed_blocks: set[int] = set()
        for it in exchange.take_results():
            received.add(it.request)
            self._figures.ended(it)
            if it.error is None:
                continue
            if self._model.simple:
                block_tokens = self._model.groups[0].block_tokens
                blocks = tables_of(it.blocks, 1)[0].blocks
                failed_blocks.update(blocks[it.first_token // block_tokens :])
            else:  # vLLM finds no request by blocks of several groups, and what is skipped is gone
                failed.add(it.request)
        freed = {self._offered.pop(handle) for handle in exchange.take_freed()}
        expired = exchange.book.expired
        self._figures.count("freed", len(freed))
        self._figures.count("expired", expired - self._expired)
        self._expired = expired
        return Results(freed, received, failed, failed_blocks)

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


def readable(tensors: Sequence[Any], *, packed: bool) -> tuple[list[Any], str, int]:
    """Show each layer's tensor as it is used, with its axes, and how many tokens are one.

    vLLM shows a layer as (block, head, token, keys and values), and its strides say how that lies.
    Where it is packed, on CPUs, the keys of a block's head come before its values, and in an order
    of the processor's own, in which no token is in one place: a block moves whole.
    """
    if any(getattr(it, "ndim", 0) != _NDIM for it in tensors) or not tensors:
        raise invalid(f"a cache of {len(tensors)} layers must have tensors of {_NDIM} dimensions")
    if not packed:
        return list(tensors), "block head token dim", 1
    blocks, heads, tokens, both = tensors[0].shape
    shape = (blocks, heads, 2, 1, tokens * both // 2)
    return [it.view(shape) for it in tensors], "block head kv token dim", tokens


def compatibility(model: Model, views: Sequence[_View]) -> Compatibility:
    """What has to be the same at the producer; numbers of workers and block sizes need not."""
    fields = {"connector": "kvplan.vllm 1", "model": model.name}
    if len(views) == 1:
        return Compatibility(fields | views[0].fields(model))
    for number, it in enumerate(views):
        of_one = ", ".join(f"{name} {value}" for name, value in it.fields(model).items())
        fields[f"group {number}"] = f"{it}, {of_one}"
    return Compatibility(fields)


def _position(name: str) -> tuple[list[int], str]:
    """Layers are in the order of their numbers, and not of their names."""
    return [int(it) for it in re.findall(r"\d+", name)], name
