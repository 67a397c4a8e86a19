"""The worker's half of the connector: its cache, and the exchange."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvplan.control.endpoint import Endpoint
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.options import Options
from kvplan.layout import Interleaved, Shard
from kvplan.planning.plan import MAX_NAME
from kvplan.serving import CacheGroup, Compatibility, Exchange, Handle, Place
from kvplan.serving.messages import LayerRange
from kvplan.serving.tables import Blocks, heads_of, tables_of
from kvplan.status import LLMException, invalid
from kvplan.system.logs import Log
from kvplan.types import CacheDesc, LlmRole
from kvplan.vllm.options import ConnectorOptions
from kvplan.vllm.states import StateForm
from kvplan.vllm.step import Figures, Step, WorkerAddress

logger = Log("kvplan.vllm")

_IDLE_WAIT_MS = 2.0  # maximum delay of a new request


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table."""

    layers: tuple[str, ...]  # names
    block_tokens: int  # summed over the ranks of context parallelism
    packing: str = ""  # the order inside a block, if attention has its own
    window: int = 0  # number of tokens that attention sees; 0: all
    states: StateForm | None = None  # of layers that have states instead of tokens


@dataclass(frozen=True)
class Model:
    """The model, and the place of a worker in it."""

    name: str  # equal on both sides
    num_heads: int  # KV heads of the whole model
    place: Place
    worker: int  # number among all workers of all replicas
    num_blocks: int
    groups: tuple[LayerGroup, ...]
    produces: bool
    consumes: bool

    @property
    def offers(self) -> bool:
        """True if consumers read from this worker: from several copies, only the first."""
        return self.produces and not self.place.copy

    @property
    def simple(self) -> bool:
        """True if a request has all of its blocks in one table."""
        (group, *others) = self.groups
        return not (others or group.window or group.states)


@dataclass(frozen=True)
class _View:
    """The cache of a group for kvplan."""

    group: LayerGroup
    names: list[str]  # of its layers, in the order of the model
    tensors: list[Any]
    desc: CacheDesc
    unit: int  # number of tokens that only move as a whole
    part: str = ""  # of the states

    def __str__(self) -> str:
        numbers = "+".join(str(index) for name in self.names for index in _position(name)[0][:1])
        return f"{self.part or 'layers'} {numbers}"[:MAX_NAME]

    def fields(self, model: Model) -> dict[str, str]:
        """Return the properties that must be equal in the producer's group."""
        group, desc = self.group, self.desc
        if group.states is not None:  # a plan compares the other axes
            heads = (desc.shard and desc.shard.num_heads) or 0
            of_layers = {"dtype": desc.data_type.name, "layers": str(len(self.names))}
            return of_layers | {"state_heads": str(heads), "tensors": str(desc.num_tensors)}
        fields = {
            "dtype": desc.data_type.name,
            "layers": str(desc.shard.num_layers if desc.shard else len(self.names)),
            "kv_heads": str(model.num_heads),
            "head_bytes": str(desc.shape[-1] * desc.data_type.bits // 8 // self.unit),
            "packing": f"{group.packing or 'plain'}, {self.unit} tokens",
        }
        if group.window:  # skipped tokens are counted in blocks
            fields["attention"] = f"window of {group.window} tokens, blocks of {group.block_tokens}"
        return fields


@dataclass(frozen=True)
class Results:
    """The results since the last step; requests by their ids."""

    sent: set[str]  # offered requests whose blocks are free
    received: set[str]  # fetched requests, even if they failed
    failed: set[str]  # requests that must be computed from their first token on
    failed_blocks: set[int]  # blocks of other failed requests, which must be computed


class ConnectorWorker:
    """The connector in a worker of vLLM, from `register` to `close`."""

    def __init__(self, instance: bytes, model: Model, options: ConnectorOptions) -> None:
        self._instance = instance
        self._model = model
        self._options = options
        self._layers: dict[str, int] = {}
        self._groups: list[int] = []  # of vLLM, for each cache
        self._engine: LlmDataDist | None = None
        self._exchange: Exchange | None = None
        self._figures = Figures()
        self._expired = 0
        self._offered: dict[Handle, str] = {}  # requests with kept blocks
        self._unread: set[str] = set()  # offered requests that another copy of this worker keeps
        self._on_host = True

    def register(self, layers: Mapping[str, Any]) -> None:
        """Register the cache that vLLM has allocated: a tensor for each layer."""
        model, options = self._model, self._options
        views = [view for group in model.groups for view in self._views(group, layers)]
        self._groups = [model.groups.index(view.group) for view in views]
        names = [name for view in views for name in view.names]
        self._layers = {name: index for index, name in enumerate(names)}
        device = layers[names[0]].device
        self._on_host = device.type == "cpu"
        if options.mode == "push":
            self._check_push(device.type)
        roles = LlmRole.MIX if model.consumes else LlmRole.PROMPT
        # The id travels in JSON, and not every library keeps larger numbers exactly.
        engine = LlmDataDist(
            secrets.randbelow(2**53 - 1) + 1, roles if model.offers else LlmRole.DECODER
        )
        given = dict(options.engine)
        if model.offers:
            given.setdefault("llm.ListenIpInfo", options.listen_of(model.worker))
            if advertised := options.advertised_of(model.worker):
                given.setdefault("kvplan.advertise", advertised)
        settings = Options.of(given)
        where = settings.listen_ip_info
        if where and not settings.advertise and Endpoint.parse(where).is_wildcard:
            raise invalid(
                f'listen="{where}" stands for all addresses of this host; set advertise to the one '
                "that consumers reach"
            )
        if not self._on_host:  # the cache is on the device of the worker's rank
            settings = replace(settings, device_id=device.index)
        engine.initialize(settings)
        try:
            groups = [
                CacheGroup(
                    str(view), engine.register_blocks_cache(view.desc, view.tensors), view.unit
                )
                for view in views
            ]
            self._exchange = Exchange(
                engine,
                groups,
                compatibility(model, views),
                self._instance,
                place=model.place,
                push=options.mode == "push",
                options=options.exchange,
            )
        except BaseException:
            engine.finalize()
            raise
        self._engine = engine
        logger.info(
            "worker %d, of rank %d of %d%s in stage %d of %d: %d layers, %s, %s",
            model.worker,
            model.place.rank,
            model.place.ranks,
            f" with {model.place.context}" if model.place.context else "",
            model.place.stage,
            len(model.place.stages),
            len(names),
            "; ".join(map(str, views)),
            f"at {engine.listen_address}" if model.offers else "not listening",
        )

    def _views(self, group: LayerGroup, layers: Mapping[str, Any]) -> list[_View]:
        """Return the caches of a group: one, or one for each part of its states."""
        model, place = self._model, self._model.place
        if absent := [name for name in group.layers if name not in layers]:
            raise invalid(f"layer {absent[0]} has no tensor")
        names = sorted(group.layers, key=_position)
        first, end = place.layers or (0, len(names))
        if end - first != len(names):
            raise invalid(
                f"the cache has {len(names)} layers; stage {place.stage} has {end - first}"
            )
        given = [layers[name] for name in names]
        shard = Shard(layers=range(first, end), num_layers=(place.stages[-1] or (0, end))[1])
        if group.states is not None:
            caches = group.states.caches(given, place.rank, shard)
            views = [
                _View(group, names, tensors, desc, 1, part)
                for part, (desc, tensors) in caches.items()
            ]
        else:
            tensors, layout, unit = readable(given, packed=bool(group.packing))
            heads = heads_of(place.rank, place.ranks, model.num_heads)
            held = replace(
                shard, heads=heads, num_heads=model.num_heads, tokens=self._context(group, unit)
            )
            desc = CacheDesc.from_tensors(tensors, layout, shard=held)
            views = [_View(group, names, tensors, desc, unit)]
        desc, unit = views[0].desc, views[0].unit
        tokens = group.block_tokens
        if not group.states:
            tokens = desc.shape[desc.seq_len_dim_index] * unit * place.contexts
        if (desc.batch_size, tokens) != (model.num_blocks, group.block_tokens):
            raise invalid(
                f"the cache has {desc.batch_size} blocks of {tokens} tokens; the scheduler has "
                f"{model.num_blocks} of {group.block_tokens}"
            )
        return views

    def _context(self, group: LayerGroup, unit: int) -> Interleaved | None:
        """Return the tokens of each request that the worker has; None: all."""
        if (context := self._model.place.context) is None:
            return None
        if unit > 1 or not self._model.simple:
            raise invalid(
                f"decode_context_parallel_size={context.ranks} must be 1 for "
                + (
                    f"attention on CPUs, whose blocks of {unit} tokens only move whole"
                    if unit > 1
                    else "a cache of several groups, of windows or of states"
                )
            )
        if (tokens := group.block_tokens // context.ranks) % context.size:
            raise invalid(
                f"cp_kv_cache_interleave_size={context.size} must be a divisor of the {tokens} "
                "tokens of a block"
            )
        return context

    def _of_caches(self, blocks: Blocks) -> Blocks:
        """Return the blocks of a request in each cache; `blocks` has those in vLLM's groups."""
        if len(self._groups) == 1:
            return blocks
        tables = tables_of(blocks, len(self._model.groups))
        return [tables[group] for group in self._groups]

    def _check_push(self, device: str) -> None:
        if not self._on_host:
            raise invalid(
                f'mode="push" needs a cache in host memory; this one is on {device}, where layers '
                'are computed later than vLLM reports: use mode="pull"'
            )
        if not self._model.simple:
            raise invalid(
                'mode="push" does not support layers with a sliding window or a state, which this '
                'model has: use mode="pull"'
            )
        if (place := self._model.place).context or place.copies > 1:
            raise invalid(
                f'mode="push" does not support decode_context_parallel_size={place.contexts} and '
                f'prefill_context_parallel_size={place.copies}: use mode="pull"'
            )

    @property
    def exchange(self) -> Exchange:
        """The exchange of the cache."""
        if self._exchange is None:
            raise LLMException("the connector has no cache: register_kv_caches was not called")
        return self._exchange

    @property
    def address(self) -> WorkerAddress | None:
        """The address of this worker; None if it does not listen."""
        if self._engine is None or self._engine.listen_address is None:
            return None
        place, context = self._model.place, None
        if place.context is not None:
            context = place.context.rank, place.context.ranks, place.context.size
        return WorkerAddress(
            self._engine.cluster_id, self._engine.listen_address, place.layers, context
        )

    def prepare(self, step: Step) -> None:
        """Begin the parts of a step that do not depend on its computation.

        A consumer may be waiting for an offer, and a step can take seconds. A fetch may write to
        blocks only after vLLM has cleared them. Blocks of the host are cleared before this call;
        `begin` fetches into blocks of a device. On return, no push reads blocks that the step
        overwrites.
        """
        exchange = self.exchange
        offers = step.offers if self._model.offers else []
        # vLLM frees a request once all workers have reported it. Consumers do not read from this
        # worker, so it reports at once.
        self._unread.update(offer.request for offer in step.offers[len(offers) :])
        self._figures.count("offered", len(offers))
        if step.chunks or step.moved:
            exchange.begin_step(step.chunks, step.moved)
        for offer in offers:
            self._offered[offer.handle] = offer.request
            exchange.enter(
                offer.request,
                self._of_caches(offer.blocks),
                offer.digest,
                offer.transfer,
                handle=offer.handle,
            )
        for transfer in step.refused:
            exchange.refuse(transfer, "was not finished by its producer")
        for request, reference in step.dropped.items():
            exchange.drop(request, reference)
        for request, reference in step.expected.items():
            exchange.expect(request, reference)
        for request in step.cancelled:
            exchange.cancel(request)
        if self._on_host:
            self._fetch(step)

    def layer_ready(self, layer: str) -> None:
        """Push a computed layer."""
        if (index := self._layers.get(layer)) is not None:  # other layers have no tensors
            self.exchange.layer_ready(index)

    def computed(self) -> None:
        """End the step, whose layers are all computed."""
        self.exchange.end_step()

    def begin(self, step: Step) -> None:
        """Begin the other parts of a step, whose computation has begun."""
        if not self._on_host:
            self._fetch(step)

    def _fetch(self, step: Step) -> None:
        for request, (reference, target) in step.fetched.items():
            blocks = self._of_caches(target.blocks)
            self.exchange.fetch(request, reference, replace(target, blocks=blocks))

    def results(self, *, idle: bool = False) -> Results:
        """Return the results since the last call.

        In an idle step, which computes nothing, wait a moment for transfers: vLLM repeats such
        steps at once, and would keep the GIL from the threads that fetch.
        """
        exchange = self.exchange
        if idle and exchange.is_fetching:
            exchange.wait(_IDLE_WAIT_MS)
        received: set[str] = set()
        failed: set[str] = set()
        failed_blocks: set[int] = set()
        for result in exchange.take_results():
            received.add(result.request)
            self._figures.ended(result)
            if result.error is None:
                continue
            if self._model.simple:
                block_tokens = self._model.groups[0].block_tokens
                blocks = tables_of(result.blocks, 1)[0].blocks
                failed_blocks.update(blocks[(result.first_token + result.pushed) // block_tokens :])
            else:  # vLLM cannot find a request by blocks of several groups
                failed.add(result.request)
        freed = {self._offered.pop(handle) for handle in exchange.take_freed()}
        expired = exchange.book.expired
        self._figures.count("freed", len(freed))
        self._figures.count("expired", expired - self._expired)
        self._expired = expired
        freed |= self._unread
        self._unread.clear()
        return Results(freed, received, failed, failed_blocks)

    def take_figures(self) -> Figures:
        """Return the figures since the last call."""
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
    """Return views of the layers' tensors, their axes, and how many tokens only move together.

    vLLM's tensor of a layer is (block, head, token, keys and values), with strides; with MLA it is
    (block, token, latent). Attention on CPUs packs its tensors: in a block the keys of a head come
    before its values, in an order that suits the processor. A token is not contiguous there, so a
    block only moves as a whole.
    """
    ndims = {getattr(tensor, "ndim", 0) for tensor in tensors}
    if ndims not in ({3}, {4}):
        raise invalid(f"a cache of {len(tensors)} layers must have tensors of 4 or 3 dimensions")
    layout, unit, shape = "block head token dim", 1, tuple(tensors[0].shape)
    if ndims == {3}:  # one head, which all workers have
        shape = (shape[0], 1, *shape[1:])
    elif packed:
        blocks, heads, unit, both = shape
        layout, shape = "block head kv token dim", (blocks, heads, 2, 1, unit * both // 2)
    return [tensor.view(shape) for tensor in tensors], layout, unit


def place_of(
    tensor: tuple[int, int],
    prefill_context: tuple[int, int],
    context: tuple[int, int],
    *,
    num_heads: int,
    stage: int = 0,
    stages: tuple[LayerRange | None, ...] = (None,),
) -> Place:
    """Return the place of a worker, from its ranks and the numbers of ranks in vLLM.

    Decode context parallelism shares out the tokens of a request, first among prefill context
    ranks, then among tensor parallel ranks. Without it, prefill context ranks have copies of each
    other's cache.

    Args:
        tensor: rank and ranks of tensor parallelism.
        prefill_context: rank and ranks of prefill context parallelism.
        context: number of ranks of decode context parallelism, and
            `cp_kv_cache_interleave_size`, the number of tokens that follow each other on one rank.
        num_heads: KV heads of the model.
        stage, stages: those of pipeline parallelism; see `Place`.
    """
    (rank, ranks), (copy, copies), (contexts, size) = tensor, prefill_context, context
    if contexts == 1:
        return Place(rank, ranks, stage, stages, None, copy, copies)
    alike = max(1, ranks // num_heads) * copies  # workers with the same heads
    if alike % contexts:
        raise invalid(
            f"decode_context_parallel_size={contexts} must be 1 or a divisor of {alike}, the "
            f"workers that have each of {num_heads} KV heads"
        )
    number = rank * copies + copy
    tokens = Interleaved(number % contexts, contexts, size)
    return Place(number // contexts, ranks * copies // contexts, stage, stages, tokens)


def compatibility(model: Model, views: Sequence[_View]) -> Compatibility:
    """Return the properties that must be equal on both sides. Block sizes may differ."""
    fields = {"connector": "kvplan.vllm 1", "model": model.name}
    if len(views) == 1:
        return Compatibility(fields | views[0].fields(model))
    for number, view in enumerate(views):
        of_one = ", ".join(f"{name} {value}" for name, value in view.fields(model).items())
        fields[f"group {number}"] = f"{view}, {of_one}"
    return Compatibility(fields)


def _position(name: str) -> tuple[list[int], str]:
    """Return the sort key of a layer: its numbers, then its name."""
    return [int(number) for number in re.findall(r"\d+", name)], name
