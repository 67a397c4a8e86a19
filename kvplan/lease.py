"""Blocks of a cache as they are one request's: a value that goes to peers by any channel."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from kvplan.planning.blocks import RequestBlocks
from kvplan.status import invalid
from kvplan.validation import (
    INT64_MAX,
    UINT64_MAX,
    as_int,
    check_type,
    check_width,
    printable,
    shown,
)

if TYPE_CHECKING:
    from kvplan.planning.blocks import Blocks

MAX_TAG: Final = 64  # characters

_SCHEMA: Final = b"kvplan.lease.2"
_DIGEST_NBYTES: Final = 8
_INSTANCE_NBYTES: Final = 16
_MAX_SLOT: Final = 2**32 - 1
_MAX_NAME: Final = 32  # characters, of a transport
_WORD: Final = Struct("=QQ")
_unpack: Final = _WORD.unpack


def tag_of(name: str) -> str:
    """A tag of any name: its beginning, with "?" for what is not printable."""
    return printable(name[:MAX_TAG])


class LeaseEnd(Enum):
    """How a lease has ended.

    Attributes:
        RELEASED: by its owner.
        EXPIRED: its `ttl_ms` has passed before that.
        CACHE_FREED: with its cache.
    """

    RELEASED = "released"
    EXPIRED = "expired"
    CACHE_FREED = "cache freed"


class LeaseWord(NamedTuple):
    """Where the owner keeps the generation of a lease, for peers that it is linked with in one way.

    Attributes:
        transport: its name, such as "local".
        slot, generation: of that transport's generation table.
    """

    transport: Annotated[str, Meta(max_length=_MAX_NAME)]
    slot: Annotated[int, Meta(ge=0, le=_MAX_SLOT)]
    generation: Annotated[int, Meta(ge=0)]


class _Packed:
    """What of a lease would take most of its memory, were it tuples: an owner may have 100,000."""

    __slots__ = ("_blocks", "_packed", "_places")
    _packed: bytes  # words, of each the slot and the generation in 8 bytes; then blocks
    _places: dict[str, slice]  # where in that the word is for links of a transport, by its name
    _blocks: Struct  # reads the blocks

    @property
    def blocks(self) -> tuple[int, ...]:
        """In the order of the request; of a contiguous cache the slot alone."""
        return self._blocks.unpack(self._packed)

    @property
    def words(self) -> tuple[LeaseWord, ...]:
        """What the owner's transports check it by."""
        return tuple(LeaseWord(name, *it) for name, it in self.places())

    def places(self) -> list[tuple[str, tuple[int, int]]]:
        """The same: the name of each transport, with the slot and the generation."""
        found, packed = [], self._packed
        for name, it in self._places.items():
            found.append((name, _unpack(packed[it])))  # a comprehension takes a fifth more
        return found

    def packed_word(self, transport: str) -> bytes | None:
        """The word that links of this transport check, as 16 bytes; None: it is not offered."""
        place = self._places.get(transport)
        return None if place is None else self._packed[place]


@dataclass(frozen=True, init=False)
class BlockLease(_Packed):
    """Blocks of a paged cache, or a slot of another one, as long as they are one request's.

    Made by `LlmDataDist.lease_blocks`; peers use it in place of a key and a block table. A transfer
    with it fails once the owner has ended it, whatever is in the blocks by then.

    Attributes:
        cluster_id: of the owner.
        instance: of the owner's engine, 16 bytes; after a restart it is another.
        cache_id: of the cache, in the owner.
        lease_id: counts the leases of that engine.
        blocks: in the order of the request; of a contiguous cache the slot alone.
        paged: whether they are blocks.
        tag: the owner's name for it, such as the id of the request.
        words: what the owner's transports check it by.
        tokens: of the request, from the first of its blocks on; None: nobody said how many.
    """

    __slots__ = ("cache_id", "cluster_id", "instance", "lease_id", "paged", "tag", "tokens")
    cluster_id: int
    instance: bytes
    cache_id: int
    lease_id: int
    blocks: tuple[int, ...]
    paged: bool
    tag: str
    words: tuple[LeaseWord, ...]
    tokens: int | None

    def __init__(
        self,
        cluster_id: int,
        instance: bytes,
        cache_id: int,
        lease_id: int,
        blocks: tuple[int, ...],
        paged: bool,
        tag: str,
        words: tuple[LeaseWord, ...],
        tokens: int | None = None,
    ) -> None:
        check_width("cluster_id", cluster_id, 0, UINT64_MAX)
        check_width("cache_id", cache_id, 0, 2**63 - 1)
        check_width("lease_id", lease_id, 0, UINT64_MAX)
        if len(check_type("instance", instance, bytes)) != _INSTANCE_NBYTES:
            raise invalid(f"instance={shown(instance)} must have {_INSTANCE_NBYTES} bytes")
        if len(check_type("tag", tag, str)) > MAX_TAG:
            raise invalid(f"tag={shown(tag)} must be of at most {MAX_TAG} printable characters")
        if not all(type(it) is int for it in check_type("blocks", blocks, tuple)):
            raise TypeError(f"blocks={shown(blocks)} must hold int")
        if blocks and not 0 <= min(blocks) <= max(blocks) <= INT64_MAX:
            raise invalid(f"blocks={shown(blocks)} must be in [0, 2**63)")
        check_type("paged", paged, bool)
        if tokens is not None:
            check_width("tokens", tokens, 1, INT64_MAX)
        for word in check_type("words", words, tuple):
            name = check_type("transport", check_type("words", word, LeaseWord).transport, str)
            if len(name) > _MAX_NAME:  # it is kept longer than the lease
                raise invalid(f"transport={shown(name)} must have at most {_MAX_NAME} characters")
            check_width("slot", word.slot, 0, _MAX_SLOT)
            check_width("generation", word.generation, 0, UINT64_MAX)
        self._set(cluster_id, instance, cache_id, lease_id, blocks, paged, tag, words, tokens)

    def _set(
        self,
        cluster_id: int,
        instance: bytes,
        cache_id: int,
        lease_id: int,
        blocks: tuple[int, ...],
        paged: bool,
        tag: str,
        words: tuple[LeaseWord, ...],
        tokens: int | None,
    ) -> None:
        """Take values of checked types and ranges; check how they belong together."""
        if not tag.isprintable():
            raise invalid(f"tag={shown(tag)} must be of at most {MAX_TAG} printable characters")
        if not paged and len(blocks) != 1:
            raise invalid(f"blocks={shown(blocks)} must be one slot, as paged is False")
        packed, names = b"", []
        for name, slot, generation in words:
            packed += _WORD.pack(slot, generation)
            names.append(name)
        places = _places_of(tuple(names))
        if len(places) < len(words):
            raise invalid(f"words={shown(words)} must be of different transports")
        largest = max(blocks, default=0)
        letter = "H" if largest < 2**16 else "I" if largest < 2**32 else "Q"
        set_field = object.__setattr__
        set_field(self, "cluster_id", cluster_id)
        set_field(self, "instance", instance)
        set_field(self, "cache_id", cache_id)
        set_field(self, "lease_id", lease_id)
        set_field(self, "paged", paged)
        set_field(self, "tag", tag)
        set_field(self, "tokens", tokens)
        set_field(self, "_packed", packed + array(letter, blocks).tobytes())
        set_field(self, "_places", places)
        set_field(self, "_blocks", _reader(len(words), len(blocks), letter))

    def __reduce__(self) -> tuple[type[BlockLease], tuple[object, ...]]:
        return BlockLease, tuple(getattr(self, it.name) for it in fields(self))

    def __str__(self) -> str:
        return f"lease {self.lease_id}{f' of {self.tag}' if self.tag else ''}"

    def to_bytes(self) -> bytes:
        """For any channel; some 100 bytes, and 1 to 5 for each block."""
        words = [(name, *word) for name, word in self.places()]
        body = _encoder.encode(
            (
                self.cluster_id,
                self.instance,
                self.cache_id,
                self.lease_id,
                self.blocks,
                self.paged,
                self.tag,
                words,
                self.tokens,
            )
        )
        return _digest(body) + body

    @classmethod
    def from_bytes(cls, blob: bytes) -> BlockLease:
        """Check and read what `to_bytes` has written.

        Raises:
            LLMException: LLM_PARAM_INVALID: it is not whole, or was changed on the way.
            TypeError: `blob` is not bytes.
        """
        check_type("blob", blob, bytes)
        body = blob[_DIGEST_NBYTES:]
        if blob[:_DIGEST_NBYTES] != _digest(body):
            raise invalid(f"blob={shown(blob)} is no lease, or was cut or changed on the way")
        try:
            lease = object.__new__(cls)
            lease._set(*_decoder.decode(body))
        except Exception as error:  # the peer's input decides which: nesting raises RecursionError
            raise invalid(f"blob={shown(blob)} is no lease: {error}") from None
        else:
            return lease

    def word(self, transport: str) -> LeaseWord | None:
        """What links of this transport check; None: the owner does not offer it there."""
        word = self.packed_word(transport)
        return None if word is None else LeaseWord(transport, *_WORD.unpack(word))

    def slot(self, argument: str) -> int:
        """The slot of a contiguous cache.

        Raises:
            LLMException: LLM_PARAM_INVALID: it is of blocks.
        """
        if self.paged:
            raise invalid(f"{argument}={self} is of blocks; a lease of a slot is needed")
        return self.blocks[0]

    def named(self, argument: str, blocks: Blocks | None) -> Blocks:
        """The blocks that a transfer moves: those of the lease, or `blocks`, all of which it has.

        Raises:
            TypeError: `blocks` is no block table.
            LLMException: LLM_PARAM_INVALID: one of `blocks` is not of this lease.
        """
        if blocks is None:
            return self.blocks
        if not hasattr(blocks, "__iter__"):
            raise TypeError(f"{argument} must be a sequence of int, not {type(blocks).__name__}")
        mine = {*self.blocks}
        if not mine.issuperset(blocks):
            for position, it in enumerate(blocks):
                if it not in mine:
                    raise invalid(f"{argument}[{position}]={shown(it)} is no block of {self}")
        return blocks  # what is no sequence the planner refuses

    def request(
        self, argument: str, blocks: Blocks | None, num_tokens: int | None, skipped: int
    ) -> tuple[Blocks, int | None]:
        """Return the block table of a transfer with this lease, and how many tokens it moves.

        Args:
            argument: the name of `blocks`.
            blocks, num_tokens: as given; None: those of the lease.
            skipped: tokens before those that are moved.

        Raises:
            TypeError, LLMException: as `named` and `num_tokens`.
        """
        if blocks is not None:
            return self.named(argument, blocks), num_tokens
        num_tokens = self.num_tokens("num_tokens", num_tokens, skipped)
        return self.blocks if num_tokens is None else RequestBlocks(self.blocks), num_tokens

    def num_tokens(self, argument: str, given: int | None, skipped: int) -> int | None:
        """How many tokens a transfer of all its blocks moves: `given`, or what it has.

        Args:
            skipped: tokens before those.

        Raises:
            TypeError: a number that is not an int.
            LLMException: LLM_PARAM_INVALID: the request has fewer, or none that are not skipped.
        """
        if self.tokens is None:
            return given
        skipped = as_int("the first token", skipped)
        given = None if given is None else as_int(argument, given)
        left = self.tokens - skipped
        wanted = left if given is None else given
        if wanted > left or left < 1:
            raise invalid(
                f"{argument}={given} with {skipped} skipped is more than the {self.tokens} tokens "
                f"of {self}"
            )
        return wanted


@lru_cache(64)
def _places_of(transports: tuple[str, ...]) -> dict[str, slice]:
    """Where the word of each is; the same object for all leases of an engine."""
    size = _WORD.size
    return {it: slice(size * i, size * (i + 1)) for i, it in enumerate(transports)}


@lru_cache(1024)
def _reader(num_words: int, num_blocks: int, letter: str) -> Struct:
    """What reads so many blocks behind so many words."""
    return Struct(f"={_WORD.size * num_words}x{num_blocks}{letter}")


_Unsigned = Annotated[int, Meta(ge=0)]  # of 64 bits, as every integer of msgpack is
_Signed = Annotated[int, Meta(ge=0, le=INT64_MAX)]
_Wire = tuple[
    _Unsigned,  # cluster_id, and so on in the order of the fields of a lease
    Annotated[bytes, Meta(min_length=_INSTANCE_NBYTES, max_length=_INSTANCE_NBYTES)],
    _Signed,
    _Unsigned,
    tuple[_Signed, ...],
    bool,
    Annotated[str, Meta(max_length=MAX_TAG)],
    Annotated[tuple[LeaseWord, ...], Meta(max_length=16)],
    Annotated[int, Meta(ge=1, le=INT64_MAX)] | None,
]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Wire] = msgspec.msgpack.Decoder(_Wire)


def _digest(body: bytes) -> bytes:
    """Finds what was cut or changed by accident; it keeps nobody from forging."""
    from hashlib import blake2b  # not at the top: it loads OpenSSL, and `import kvplan` a lease

    return blake2b(body, digest_size=_DIGEST_NBYTES, person=_SCHEMA).digest()
