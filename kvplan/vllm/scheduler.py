"""The scheduler's half of the connector: which requests are fetched, and which are offered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Protocol

from kvplan.logs import Log
from kvplan.serving import Reference, Source, Target, token_digest
from kvplan.status import LLMException
from kvplan.vllm.step import Offer, Step, WorkerAddress

logger = Log("kvplan.vllm")

REFERENCE: Final = "kvplan"
"""The key of `kv_transfer_params` under which the reference is."""

_KEPT: Final = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


class Request(Protocol):
    """What is used of vLLM's Request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    num_computed_tokens: int
    status: Any
    lora_request: Any
    cache_salt: str | None
    mm_features: Sequence[Any]


class ConnectorScheduler:
    """Lives in the process of vLLM's scheduler, and says to the workers what to do.

    Args:
        engine_id: of vLLM's engine; another after a restart.
    """

    def __init__(self, engine_id: str) -> None:
        self.instance = instance_of(engine_id)
        self._sources: tuple[Source, ...] = ()
        self._next = 0
        self._pending: dict[str, Reference] = {}  # arrived, and without blocks
        self._step = Step()

    def set_workers(self, workers: Mapping[int, WorkerAddress]) -> None:
        """Learn where consumers reach the workers, by rank."""
        self._sources = tuple(
            Source(workers[rank].cluster_id, workers[rank].address) for rank in sorted(workers)
        )

    def arrived(self, request: Request) -> None:
        """A request was added: let the workers prepare if it is to be fetched."""
        params = request.kv_transfer_params or {}
        tokens = request.prompt_token_ids
        if not params.get("do_remote_prefill") or not tokens:
            return
        try:
            theirs = Reference.from_dict(params.get(REFERENCE) or {})
        except LLMException as error:
            logger.warning("%s: its prompt is computed here: %s", request.request_id, error)
            return
        # What is asked for is what this side means: other tokens are refused by the producer.
        num_tokens = min(theirs.num_tokens, len(tokens))
        mine = Reference(
            theirs.instance,
            theirs.sequence,
            token_digest(tokens[:num_tokens], *_extra(request)),
            num_tokens,
            theirs.sources,
        )
        self._pending[request.request_id] = self._step.expected[request.request_id] = mine

    def missing_tokens(self, request: Request, num_computed: int) -> int:
        """How many tokens beyond `num_computed` can be fetched."""
        reference = self._pending.get(request.request_id)
        return max(0, reference.num_tokens - num_computed) if reference else 0

    def allocated(self, request: Request, blocks: Sequence[int], num_external: int) -> None:
        """A request has blocks: fetch the last `num_external` tokens of what is to be fetched."""
        if (reference := self._pending.pop(request.request_id, None)) is None:
            return
        if num_external > 0:
            target = Target(tuple(blocks), reference.num_tokens - num_external)
            self._step.fetched[request.request_id] = reference, target
        else:  # all of it is here already
            self._step.dropped[request.request_id] = reference

    def finished(
        self, request: Request, blocks: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; returns whether its blocks are kept, and what goes with it."""
        if (reference := self._pending.pop(request.request_id, None)) is not None:
            self._step.dropped[request.request_id] = reference
        params, tokens = request.kv_transfer_params or {}, request.prompt_token_ids
        if not params.get("do_remote_decode") or request.status.name not in _KEPT:
            return False, None
        num_tokens = min(request.num_computed_tokens, len(tokens or ()))
        if not tokens or not num_tokens or not blocks:
            return False, None
        digest = token_digest(tokens[:num_tokens], *_extra(request))
        sequence, self._next = self._next, self._next + 1
        self._step.offers.append(Offer(sequence, request.request_id, tuple(blocks), digest))
        reference = Reference(self.instance, sequence, digest, num_tokens, self._sources)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            REFERENCE: reference.to_dict(),
        }

    def take_step(self) -> Step:
        """What the workers do with the next step."""
        step, self._step = self._step, Step()
        return step


def instance_of(engine_id: str) -> bytes:
    """What names an engine in references."""
    return blake2b(engine_id.encode(), digest_size=16, person=b"kvplan.vllm").digest()


def _extra(request: Request) -> list[str]:
    """What a request's cache depends on besides its tokens."""
    lora = request.lora_request
    return [
        str(lora.lora_name) if lora else "",
        request.cache_salt or "",
        *(str(it.identifier) for it in request.mm_features or ()),
    ]
