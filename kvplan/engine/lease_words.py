"""The words of leases: one in the generation table of each transport that checks leases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvplan.engine.claims import not_exist
from kvplan.lease import BlockLease, LeaseWord
from kvplan.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from kvplan.transport.transport import Transport


class LeaseWords:
    """The words of the leases of one engine; thread-safe.

    Args:
        transports: check the leases of peers.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}

    def begin(self, deadline_ns: int) -> tuple[LeaseWord, ...]:
        """Begin a word with each transport that checks leases; `deadline_ns` 0: no deadline."""
        words: list[LeaseWord] = []
        refusal = not_exist("the engine has no transport")
        try:
            for name, transport in self._transports.items():
                try:
                    words.append(LeaseWord(name, *transport.begin_lease(deadline_ns)))
                except LLMException as error:
                    if error.status_code is not LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
                        raise
                    refusal = error
        except BaseException:
            self.drop(words)
            raise
        if not words:
            raise refusal
        return tuple(words)

    def renew(self, lease: BlockLease, deadline_ns: int) -> None:
        """Set another deadline of all words of a lease."""
        for transport, (slot, generation) in lease.places():
            self._transports[transport].renew_lease(slot, generation, deadline_ns)

    def drop(self, words: Iterable[LeaseWord]) -> None:
        """End words that no peer has."""
        self._end((transport, (slot, generation)) for transport, slot, generation in words)

    def end(self, lease: BlockLease) -> None:
        """End the words of a lease; on return no peer writes with them. Idempotent.

        If a peer delays one transport, the words of the others have ended all the same.
        """
        self._end(lease.places())

    def end_together(self, leases: Iterable[BlockLease]) -> None:
        """End the words of several leases, as `end`: each transport waits once for its peers."""
        words: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for lease in leases:
            for name, word in lease.places():
                words[name].append(word)
        with ExitStack() as ends:
            for name, of_transport in words.items():
                ends.callback(self._transports[name].end_leases, of_transport)

    def _end(self, words: Iterable[tuple[str, tuple[int, int]]]) -> None:
        left = iter(words)
        for transport, word in left:
            try:
                self._transports[transport].end_leases((word,))
            except BaseException:  # a peer delays this transport; the others still end
                self._end(left)
                raise
