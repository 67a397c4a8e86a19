"""The scheduler's half of the connector, which decides what is fetched and offered."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Protocol

from kvplan.serving import Chunk, Handle, Reference, Source, Table, Target, token_digest
from kvplan.serving.messages import check_transfer
from kvplan.serving.tables import Blocks
from kvplan.status import LLMException
from kvplan.system.logs import LimitedLog, Log
from kvplan.vllm.step import Offer, Step, WorkerAddress

client_log = LimitedLog(Log("kvplan.vllm"))  # for lines that clients of the server can cause
REFERENCE: Final = "kvplan"
"""The key of the reference in `kv_transfer_params`."""
_KEPT: Final = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
_NULL_BLOCK: Final = 0  # vLLM's block for tokens that have left the window


class Inputs(Protocol):
    """The fields of vLLM's Request that determine its KV cache."""

    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    lora_request: Any
    cache_salt: str | None
    mm_features: Sequence[Any]


class UnknownInputError(Exception):
    """A request has an input unknown to this connector, so its cache is not transferred."""


CountKeys = Callable[[Any, int], int]
"""A function that counts the keys, without tokens, of vLLM's prefix cache for a prefix."""


def digest_of(request: Inputs, num_tokens: int, count_keys: CountKeys | None = None) -> bytes:
    """Return the digest of a prefix of a prompt, and of all other keys of vLLM's prefix cache."""
    tokens = request.prompt_token_ids
    if not tokens:
        raise UnknownInputError("a prompt without token ids")
    keys = [*_lora(request), *_features(request, num_tokens), *_salt(request)]
    keys += _embeds(request, num_tokens)
    if count_keys is not None and (found := count_keys(request, num_tokens)) != len(keys):
        raise UnknownInputError(f"vLLM has {found} keys besides its tokens; kvplan has {len(keys)}")
    return token_digest(tokens[:num_tokens], *(part for key in keys for part in key))


def _lora(request: Inputs) -> list[tuple[str, ...]]:
    """Return the key of the adapter, name and path: a name may mean other weights elsewhere."""
    if (lora := request.lora_request) is None:
        return []
    name, path = getattr(lora, "lora_name", None), getattr(lora, "lora_path", None)
    if not isinstance(name, str) or not isinstance(path, str):
        raise UnknownInputError(f"a LoRA adapter {lora!r} without a name or a path")
    return [("lora", name, path)]


def _features(request: Inputs, num_tokens: int) -> list[tuple[str, ...]]:
    """Return the keys of images and the like, with their positions in the prompt."""
    keys: list[tuple[str, ...]] = []
    for feature in request.mm_features or ():
        place = getattr(feature, "mm_position", None)
        offset, length = getattr(place, "offset", None), getattr(place, "length", None)
        identifier = feature.identifier
        if not (
            isinstance(identifier, str) and isinstance(offset, int) and isinstance(length, int)
        ):
            raise UnknownInputError(f"a feature {identifier!r} at {place!r}")
        if offset < num_tokens:
            keys.append(("mm", identifier, str(offset), str(length)))
    return keys


def _salt(request: Inputs) -> list[tuple[str, ...]]:
    return [("salt", request.cache_salt)] if request.cache_salt else []


def _embeds(request: Inputs, num_tokens: int) -> list[tuple[str, ...]]:
    """Return the key of embeddings in place of tokens."""
    if (embeds := request.prompt_embeds) is None:
        return []
    try:
        rows = embeds[:num_tokens].detach().cpu().contiguous()
        nbytes = rows.numel() * rows.element_size()
        content = ctypes.string_at(rows.data_ptr(), nbytes)
        form = f"{rows.dtype} {tuple(rows.shape)}"
    except (AttributeError, TypeError, IndexError) as error:
        raise UnknownInputError(f"prompt_embeds of {type(embeds).__name__}: {error}") from None
    return [("embeds", form, blake2b(content, digest_size=32).hexdigest())]


class Request(Inputs, Protocol):
    """The fields of vLLM's Request that the connector uses."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int
    _all_token_ids: list[int]
    status: Any


@dataclass
class _Computed:
    """A request that this engine computes, and that a consumer may be waiting for."""

    request: Request
    transfer: str
    digest: bytes
    num_tokens: int
    whole: bool = False  # True once its whole prompt was scheduled


class ConnectorScheduler:
    """The connector in the process of vLLM's scheduler, which makes the steps of the workers."""

    def __init__(
        self,
        engine_id: str,
        *,
        windowed: bool = False,  # True if layers have a sliding window
        states: Sequence[int] = (),  # tokens of a block of states, by group; 0: no states
        count_keys: CountKeys | None = None,
    ) -> None:
        self._states = states if any(states) else ()
        self._leaves_last = windowed or any(states)
        self._count_keys = count_keys
        self.instance = instance_of(engine_id)
        self._sources: tuple[Source, ...] = ()
        self._pending: dict[str, Reference] = {}  # requests without blocks
        self._fetching: set[str] = set()  # requests with blocks, until their result
        self._computing: dict[str, _Computed] = {}  # requests for waiting consumers
        self._step = Step()

    def set_workers(self, workers: Mapping[tuple[int, int], WorkerAddress]) -> None:
        """Store the addresses of the workers, by stage and rank; `place_of` explains the rank."""
        self._sources = tuple(
            Source(worker.cluster_id, worker.address, worker.layers, worker.context)
            for _, worker in sorted(workers.items())
        )

    def arrived(self, request: Request) -> None:
        """Take a new request, and let the workers prepare if it will be fetched."""
        params = request.kv_transfer_params or {}
        tokens = request.prompt_token_ids
        if not tokens:
            return
        if self._leaves_last and params.get("do_remote_decode"):
            if request.prompt_embeds is not None:  # embeddings would outnumber tokens by one
                return
            _leave_last(request)
        if params.get("do_remote_decode") and (transfer := _transfer(request)):
            digest = self._digest(request, len(tokens))
            if digest is None:
                self._step.refused.append(transfer)
            else:
                computed = _Computed(request, transfer, digest, len(tokens))
                self._computing[request.request_id] = computed
        if not params.get("do_remote_prefill"):
            return
        try:
            theirs = Reference.from_dict(params.get(REFERENCE) or {})
        except LLMException as error:
            client_log.warning("%s: its prompt is computed here: %s", request.request_id, error)
            return
        # The digest is of this side's tokens: the producer refuses a request of other tokens.
        num_tokens = self._num_fetched(len(tokens))
        if not theirs.transfer:
            num_tokens = min(theirs.num_tokens, num_tokens)
        digest = None
        if request.request_id in self._fetching:  # of an aborted request; workers would refuse it
            client_log.warning("%s: its name is in use; computed here", request.request_id)
        elif num_tokens:
            digest = self._digest(request, num_tokens)
        if digest is None:
            if theirs.handle is not None:  # the producer may free the request
                self._drop(request.request_id, theirs)
            return
        mine = Reference(
            theirs.instance,
            theirs.handle,
            digest,
            num_tokens,
            theirs.sources,
            theirs.transfer,
        )
        self._pending[request.request_id] = self._step.expected[request.request_id] = mine

    def missing_tokens(self, request: Request, num_computed: int) -> int:
        """Return how many tokens beyond `num_computed` can be fetched."""
        reference = self._pending.get(request.request_id)
        return max(0, reference.num_tokens - num_computed) if reference else 0

    def allocated(
        self, request: Request, blocks: Sequence[Sequence[int]], num_external: int
    ) -> None:
        """Fetch the last `num_external` tokens of a request into its blocks in each group."""
        if (reference := self._pending.pop(request.request_id, None)) is None:
            return
        if num_external > 0:
            held = self._held(blocks, reference.num_tokens)
            target = Target(held, reference.num_tokens - num_external)
            self._fetching.add(request.request_id)
            self._step.fetched[request.request_id] = reference, target
        else:  # all tokens are already here
            self._drop(request.request_id, reference)

    def finished(
        self, request: Request, blocks: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; return True if its blocks are kept, and parameters for its consumer."""
        if (reference := self._pending.pop(request.request_id, None)) is not None:
            self._drop(request.request_id, reference)
        if request.request_id in self._fetching:  # aborted
            self._step.cancelled.append(request.request_id)
        computed = self._computing.pop(request.request_id, None)
        params, tokens = request.kv_transfer_params or {}, request.prompt_token_ids
        num_tokens = min(request.num_computed_tokens, len(tokens or ()))
        kept = params.get("do_remote_decode") and request.status.name in _KEPT
        kept = kept and num_tokens and all(blocks)
        if self._leaves_last and request.prompt_embeds is not None:
            kept = False
        held = self._held(blocks, num_tokens) if kept else ()
        if self._states and any(isinstance(of, Table) and not of.blocks for of in held):
            kept = False
        digest = self._digest(request, num_tokens) if kept else None
        if digest is None:
            if computed is not None:
                self._step.moved.append(computed.transfer)
                self._step.refused.append(computed.transfer)
            return False, None
        transfer = "" if computed is None else computed.transfer
        handle = Handle.new()
        self._step.offers.append(Offer(handle, request.request_id, held, digest, transfer))
        reference = Reference(self.instance, handle, digest, num_tokens, self._sources)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            REFERENCE: reference.to_dict(),
        }

    def computing(
        self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int] | None]
    ) -> None:
        """Add the chunks of requests with waiting consumers."""
        for name in scheduled.keys() & self._computing.keys():
            computed = self._computing[name]
            end = computed.request.num_computed_tokens + scheduled[name]
            if not computed.whole and (blocks := blocks_of(name)):
                computed.whole = end >= computed.num_tokens
                end = min(end, computed.num_tokens)
                chunk = Chunk(
                    computed.transfer, computed.digest, tuple(blocks), end, computed.whole
                )
                self._step.chunks.append(chunk)

    def preempted(self, requests: Iterable[str]) -> None:
        """Note requests that have lost their blocks, and will be computed again in other blocks."""
        for name in requests:
            if (computed := self._computing.get(name)) is not None:
                computed.whole = False
                self._step.moved.append(computed.transfer)

    def fetched(self, requests: Iterable[str]) -> None:
        """Note requests whose result the workers have reported."""
        self._fetching.difference_update(requests)

    def take_step(self) -> Step:
        """Return the next step of the workers, and begin another."""
        step, self._step = self._step, Step()
        return step

    def _drop(self, name: str, reference: Reference) -> None:
        """Let the workers drop a request, under a name that no other request has."""
        if self._step.expected.get(name) is reference:
            del self._step.expected[name]
        while name in self._fetching or name in self._pending or name in self._step.dropped:
            name += " (again)"
        self._step.dropped[name] = reference

    def _digest(self, request: Request, num_tokens: int) -> bytes | None:
        """Return the digest of a prefix of a request; None if its inputs are unknown."""
        try:
            return digest_of(request, num_tokens, self._count_keys)
        except UnknownInputError as error:
            client_log.warning("%s: its cache is not transferred: %s", request.request_id, error)
            return None

    def _num_fetched(self, num_tokens: int) -> int:
        """Return how many tokens of a prompt are fetched; a state must not include the last one."""
        last = self._leaves_last and (num_tokens > 1 or self._states)
        return num_tokens - 1 if last else num_tokens

    def _held(self, blocks: Sequence[Sequence[int]], num_tokens: int) -> Blocks:
        """Return the blocks of a request by group, without null blocks; of states, the last."""
        if len(blocks) == 1 and not self._leaves_last:
            return tuple(blocks[0])
        tables = []
        for number, of_group in enumerate(blocks):
            if self._states and (block_tokens := self._states[number]):
                at = (num_tokens - 1) // block_tokens
                state = [block for block in of_group[at : at + 1] if block != _NULL_BLOCK]
                tables.append(Table(tuple(state)))
                continue
            skipped = next(
                (at for at, block in enumerate(of_group) if block != _NULL_BLOCK), len(of_group)
            )
            tables.append(Table(tuple(of_group[skipped:]), skipped))
        return tuple(tables)


def instance_of(engine_id: str) -> bytes:
    """Return the name of an engine in references."""
    return blake2b(engine_id.encode(), digest_size=16, person=b"kvplan.vllm").digest()


def _leave_last(request: Request) -> None:
    """Remove the last token of a prompt, as vLLM's own connectors do: the consumer computes it."""
    # After this token vLLM might free the block with the first token of the consumer's window.
    tokens = request.prompt_token_ids
    if not tokens or len(tokens) < 2:
        return
    del tokens[-1]
    if len(request._all_token_ids) > len(tokens):  # may be the same list
        del request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1  # the next token would not continue the prompt


def _transfer(request: Request) -> str:
    """Return the name by which a consumer asks for a request; empty if there is none."""
    given = (request.kv_transfer_params or {}).get(REFERENCE)
    transfer = given.get("transfer", "") if isinstance(given, dict) else ""
    try:
        return check_transfer(transfer)
    except LLMException as error:
        client_log.warning("%s: no consumer can wait for it: %s", request.request_id, error)
        return ""
