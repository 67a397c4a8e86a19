"""Leases of the blocks of a request: values that owners send to peers over any channel."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from kvplan.planning.blocks import RequestBlocks, block_table
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

_SCHEMA: Final = b"kvplan.lease.3"
_DIGEST_NBYTES: Final = 8
_INSTANCE_NBYTES: Final = 16
_MAX_SLOT: Final = 2**32 - 1
_MAX_NAME: Final = 32  # characters of a transport's name
_WORD: Final = Struct("=QQ")
_unpack: Final = _WORD.unpack
_CHECKED: Final = "instance", "tag", "blocks", "paged", "words"
_KINDS: Final[tuple[type[object], ...]] = bytes, str, tuple, bool, tuple


def tag_of(name: str) -> str:
    """Return the beginning of a name as one printable line."""
    return printable(name[:MAX_TAG])


class LeaseEnd(Enum):
    """The way in which a lease has ended.

    Attributes:
        RELEASED: its owner has released it.
        EXPIRED: its `ttl_ms` has passed.
        CACHE_FREED: its cache was freed.
        MOVED: its owner has moved a block of it, and the lease did not follow.
    """

    RELEASED = "released"
    EXPIRED = "expired"
    CACHE_FREED = "cache freed"
    MOVED = "moved"


class LeaseWord(NamedTuple):
    """The place of the generation of a lease, for peers that are linked over one transport.

    Attributes:
        transport: name of the transport, such as "local".
        slot, generation: in the generation table of the transport.
    """

    transport: str
    slot: int
    generation: int


class _Packed:
    """Blocks and words of a lease, packed, since an owner may have 100,000 leases."""

    __slots__ = ("_blocks", "_packed", "_places")
    _packed: bytes  # words: slot and generation, 8 bytes each; then blocks
    _places: dict[str, slice]  # of the words in `_packed`, by transport
    _blocks: Struct  # reads the blocks

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks in the order of the request; the slot of a contiguous cache."""
        return self._blocks.unpack(self._packed)

    @property
    def words(self) -> tuple[LeaseWord, ...]:
        """The words by which the transports of the owner check the lease."""
        words = []
        for name, word in self.places():
            words.append(LeaseWord(name, *word))
        return tuple(words)

    def places(self) -> list[tuple[str, tuple[int, int]]]:
        """Return the words as (transport, (slot, generation))."""
        found, packed = [], self._packed
        for name, place in self._places.items():
            found.append((name, _unpack(packed[place])))  # a comprehension takes a fifth longer
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the packed blocks and words."""
        return len(self._packed)

    def packed_word(self, transport: str) -> bytes | None:
        """Return the word for links of a transport, as 16 bytes; None: no such word."""
        place = self._places.get(transport)
        return None if place is None else self._packed[place]


@dataclass(frozen=True, init=False)
class BlockLease(_Packed):
    """Blocks of a paged cache, or a slot of a contiguous one, while they belong to one request.

    `LlmDataDist.lease_blocks` makes leases; peers use them instead of a key and a block table. A
    transfer fails once the owner has ended its lease, whatever the blocks hold by then.

    Attributes:
        cluster_id: id of the owner.
        instance: 16 bytes that name the owner's engine; a restart changes them.
        cache_id: id of the cache in the owner.
        lease_id: number of the lease in the owner's engine.
        blocks: blocks in the order of the request, or the slot of a contiguous cache.
        paged: True for blocks, False for a slot.
        tag: the owner's name for the lease, such as the id of the request.
        words: the words by which the transports of the owner check the lease.
        tokens: tokens of the request, from the first of its blocks on; None: unknown.
        moves: number of times that the owner has moved blocks of the lease; see `replaces`.
    """

    __slots__ = (
        "cache_id",
        "cluster_id",
        "instance",
        "lease_id",
        "moves",
        "paged",
        "tag",
        "tokens",
    )
    cluster_id: int
    instance: bytes
    cache_id: int
    lease_id: int
    blocks: tuple[int, ...]
    paged: bool
    tag: str
    words: tuple[LeaseWord, ...]
    tokens: int | None
    moves: int

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
        moves: int = 0,
    ) -> None:
        check_width("cluster_id", cluster_id, 0, UINT64_MAX)
        check_width("cache_id", cache_id, 0, 2**63 - 1)
        check_width("lease_id", lease_id, 0, UINT64_MAX)
        given = instance, tag, blocks, paged, words
        if tuple(map(type, given)) != _KINDS:  # a call for each would slow down every request
            for name, value, kind in zip(_CHECKED, given, _KINDS, strict=True):
                check_type(name, value, kind)
        if len(instance) != _INSTANCE_NBYTES:
            raise invalid(f"instance={shown(instance)} must have {_INSTANCE_NBYTES} bytes")
        if len(tag) > MAX_TAG or not tag.isprintable():
            raise invalid(f"tag={shown(tag)} must have at most {MAX_TAG} printable characters")
        if not {*map(type, blocks)} <= {int}:
            raise TypeError(f"blocks={shown(blocks)} must hold int")
        if blocks and not 0 <= min(blocks) <= max(blocks) <= INT64_MAX:
            raise invalid(f"blocks={shown(blocks)} must be in [0, 2**63)")
        if tokens is not None:
            check_width("tokens", tokens, 1, INT64_MAX)
        if moves != 0:
            check_width("moves", moves, 0, UINT64_MAX)
        if not {*map(type, words)} <= {LeaseWord}:
            raise TypeError(f"words={shown(words)} must hold LeaseWord")
        for name, slot, generation in words:
            if not isinstance(name, str):
                raise TypeError(f"transport={shown(name)} must be str")
            if len(name) > _MAX_NAME:  # the cache of `_places_of` keeps names after their leases
                raise invalid(f"transport={shown(name)} must have at most {_MAX_NAME} characters")
            check_width("slot", slot, 0, _MAX_SLOT)
            check_width("generation", generation, 0, UINT64_MAX)
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
        for field, value in (
            ("cluster_id", cluster_id),
            ("instance", instance),
            ("cache_id", cache_id),
            ("lease_id", lease_id),
            ("paged", paged),
            ("tag", tag),
            ("tokens", tokens),
            ("moves", moves),
            ("_packed", packed + array(letter, blocks).tobytes()),
            ("_places", places),
            ("_blocks", _reader(len(words), len(blocks), letter)),
        ):
            object.__setattr__(self, field, value)

    def __reduce__(self) -> tuple[type[BlockLease], tuple[object, ...]]:
        return BlockLease, _fields_of(self)

    def __str__(self) -> str:
        return f"lease {self.lease_id}{f' of {self.tag}' if self.tag else ''}"

    def to_bytes(self) -> bytes:
        """Return the lease as bytes: about 100, plus 1 to 9 for each block."""
        body = _encoder.encode(_fields_of(self))
        return _digest(body) + body

    @classmethod
    def from_bytes(cls, blob: bytes) -> BlockLease:
        """Check and read the result of `to_bytes`.

        Raises:
            LLMException: LLM_PARAM_INVALID: `blob` was cut or changed on the way.
            TypeError: `blob` is not bytes.
        """
        check_type("blob", blob, bytes)
        body = blob[_DIGEST_NBYTES:]
        if blob[:_DIGEST_NBYTES] != _digest(body):
            raise invalid(f"blob={shown(blob)} is not a lease, or was cut or changed on the way")
        try:
            return cls(*_decoder.decode(body))
        except Exception as error:  # of any kind: nested input raises RecursionError
            raise invalid(f"blob={shown(blob)} is not a lease: {error}") from None

    def word(self, transport: str) -> LeaseWord | None:
        """Return the word for links of a transport; None: no such word."""
        word = self.packed_word(transport)
        return None if word is None else LeaseWord(transport, *_WORD.unpack(word))

    def slot(self, argument: str) -> int:
        """Return the slot of a contiguous cache.

        Raises:
            LLMException: LLM_PARAM_INVALID: the lease has blocks, not a slot.
        """
        if self.paged:
            raise invalid(f"{argument}={self} has blocks; a lease of a slot is needed")
        return self.blocks[0]

    def named(self, argument: str, blocks: Blocks | None) -> Blocks:
        """Return the blocks that a transfer moves: a copy of `blocks`, or all of the lease.

        Raises:
            TypeError: `blocks` is not a block table.
            LLMException: LLM_PARAM_INVALID: one of `blocks` is not in this lease.
        """
        if blocks is None:
            return self.blocks
        mine = {*self.blocks}
        table: list[int] = block_table(argument, blocks).tolist()
        if not mine.issuperset(table):
            position, block = next(row for row in enumerate(table) if row[1] not in mine)
            raise invalid(f"{argument}[{position}]={block} is not a block of {self}")
        return RequestBlocks(table) if type(blocks) is RequestBlocks else table

    def replaces(self, other: BlockLease) -> bool:
        """Return whether this is a later value of the same lease: its owner has moved blocks."""
        return self.moves > other.moves and self == replace(
            other, blocks=self.blocks, words=self.words, moves=self.moves
        )

    def places_of(self, argument: str, earlier: BlockLease, blocks: Blocks | None) -> Blocks | None:
        """Return the current places of blocks that an earlier value of this lease names.

        Args:
            argument: the name of `blocks`.
            earlier: a value that this one replaces.
            blocks: blocks of `earlier`; None: all.

        Raises:
            TypeError, LLMException: see `named`.
        """
        if blocks is None:
            return None
        now = dict(zip(earlier.blocks, self.blocks, strict=True))
        moved = [now[block] for block in earlier.named(argument, blocks)]
        return RequestBlocks(moved) if isinstance(blocks, RequestBlocks) else moved

    def request(
        self, argument: str, blocks: Blocks | None, num_tokens: int | None, skipped: int
    ) -> tuple[Blocks, int | None]:
        """Return the block table of a transfer with this lease, and the number of its tokens.

        Args:
            argument: the name of `blocks`.
            blocks, num_tokens: as given; None: those of the lease.
            skipped: number of tokens before the ones that move.

        Raises:
            TypeError, LLMException: see `named` and `num_tokens`.
        """
        if blocks is not None:
            return self.named(argument, blocks), num_tokens
        num_tokens = self.num_tokens("num_tokens", num_tokens, skipped)
        return self.blocks if num_tokens is None else RequestBlocks(self.blocks), num_tokens

    def num_tokens(self, argument: str, given: int | None, skipped: int) -> int | None:
        """Return the number of tokens that a transfer of all blocks moves.

        Args:
            argument: the name of `given`.
            given: number of tokens; None: that of the lease.
            skipped: number of tokens before the ones that move.

        Raises:
            TypeError: a number that is not an int.
            LLMException: LLM_PARAM_INVALID: the request has fewer tokens, or skips all.
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


_fields_of = attrgetter(*(field.name for field in fields(BlockLease)))


@lru_cache(64)
def _places_of(transports: tuple[str, ...]) -> dict[str, slice]:
    """Return the place of each word; the same object for all leases of an engine."""
    size = _WORD.size
    return {name: slice(size * i, size * (i + 1)) for i, name in enumerate(transports)}


@lru_cache(1024)
def _reader(num_words: int, num_blocks: int, letter: str) -> Struct:
    """Return a reader of blocks that follow words."""
    return Struct(f"={_WORD.size * num_words}x{num_blocks}{letter}")


_Words = Annotated[tuple[LeaseWord, ...], Meta(max_length=16)]
_Wire = tuple[int, bytes, int, int, tuple[int, ...], bool, str, _Words, int | None, int]
"""The fields of a lease in their order; the constructor checks their ranges."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Wire] = msgspec.msgpack.Decoder(_Wire)


def _digest(body: bytes) -> bytes:
    """Return a checksum against accidents; it does not prevent forgery."""
    from hashlib import blake2b  # here, so that `import kvplan` does not load OpenSSL

    return blake2b(body, digest_size=_DIGEST_NBYTES, person=_SCHEMA).digest()
