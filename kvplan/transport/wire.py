"""Metadata that processes send their peers, as JSON. All that comes from outside is checked."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from reprlib import repr as show  # short, however long or deep the value is
from typing import TYPE_CHECKING, Any, Final

from kvplan.status import LLMException, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from _typeshed import DataclassInstance

Bounds = tuple[int, int]

ADDRESS: Final[Bounds] = (1, 2**64 - 1)
SIZE: Final[Bounds] = (1, 2**63 - 1)
NUMBER: Final[Bounds] = (0, 2**63 - 1)
UINT64: Final[Bounds] = (0, 2**64 - 1)


def range_bounds(slots: Bounds, generations: Bounds = NUMBER) -> dict[str, Bounds]:
    """What the numbers of a registered range may be."""
    return {"address": ADDRESS, "nbytes": SIZE, "slot": slots, "generation": generations}


def write_schema(schema: str, version: int, fields: Mapping[str, object]) -> bytes:
    """`fields` as what `Document.read_schema` reads: JSON, UTF-8."""
    document = {"schema": schema, "schema_version": version, **fields}
    return json.dumps(document, separators=(",", ":")).encode()


def fields_of(value: DataclassInstance) -> dict[str, Any]:
    """The fields of a dataclass, as they are."""
    # dataclasses.asdict copies deeply: ten times the time.
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON document under check.

    Attributes:
        name: what messages call it, such as "peer metadata".
        max_nbytes: bytes that it may have.
    """

    name: str
    max_nbytes: int

    def read(self, blob: bytes | str) -> Any:
        """Its value.

        Raises:
            LLMException: LLM_PARAM_INVALID: too large, or no JSON.
        """
        if len(blob) > self.max_nbytes:
            raise self.bad(f"is {len(blob)} bytes long; at most {self.max_nbytes} are allowed")
        try:
            return json.loads(blob)
        except (ValueError, RecursionError) as error:
            raise self.bad(f"is no JSON: {error}") from None

    def read_schema(self, blob: bytes, schema: str, version: int) -> Any:
        """As `read`, of metadata that says by `schema` and `schema_version` what it is.

        Raises:
            TypeError: no bytes.
        """
        if not isinstance(blob, bytes | bytearray | memoryview):
            raise TypeError(f"metadata must be bytes, not {type(blob).__name__}")
        document = self.read(bytes(blob))
        found = document if isinstance(document, dict) else {}
        theirs, number = found.get("schema"), found.get("schema_version")
        if theirs != schema or type(number) is not int or number != version:
            raise self.bad(
                f"is of schema {show(theirs)} version {show(number)}; this kvplan reads "
                f"{schema!r} version {version}"
            )
        return document

    def fields(
        self, path: str, value: object, names: Collection[str], optional: Collection[str] = ()
    ) -> dict[str, Any]:
        """`value`, if it is an object with just the fields `names`, and any of `optional`."""
        if not isinstance(value, dict) or not (
            set(names) <= set(value) <= set(names) | set(optional)
        ):
            found = sorted(value) if isinstance(value, dict) else value
            more = f", and possibly {', '.join(sorted(optional))}" if optional else ""
            raise self.bad(
                f"{path or 'document'} is {show(found)}; it must be an object with just the "
                f"fields {', '.join(sorted(names))}{more}"
            )
        return value

    def elements(self, path: str, value: object, count: int | None = None) -> list[Any]:
        """`value`, if it is a list, of `count` elements where that is given."""
        if not isinstance(value, list) or count not in (None, len(value)):
            found = f"a list of {len(value)}" if isinstance(value, list) else show(value)
            of = "" if count is None else f" of exactly {count}"
            raise self.bad(f"{path} is {found}; it must be a list{of}")
        return value

    def numbers(
        self, path: str, fields: dict[str, Any], bounds: Mapping[str, Bounds]
    ) -> dict[str, int]:
        """The fields that `bounds` names, if they are whole numbers inside."""
        for name, (low, high) in bounds.items():
            value = fields[name]
            if type(value) is not int or not low <= value <= high:
                raise self.bad(
                    f"{path}.{name} is {show(value)}; it must be a whole number in [{low}, {high}]"
                )
        return {name: fields[name] for name in bounds}

    def record(self, path: str, value: object, bounds: Mapping[str, Bounds]) -> dict[str, int]:
        """`value`, if it is an object with just the whole numbers that `bounds` names."""
        return self.numbers(path, self.fields(path, value, bounds.keys()), bounds)

    def range(
        self,
        path: str,
        value: object,
        bounds: Mapping[str, Bounds],
        num_slots: int,
        more: Collection[str] = (),
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A registered range: the fields of `Range`, and all, with those of `more` unchecked."""
        fields = self.fields(path, value, {"writable", *bounds, *more})
        numbers = self.numbers(path, fields, bounds)
        address, nbytes, slot = (numbers[it] for it in ("address", "nbytes", "slot"))
        if address + nbytes > 2**64:
            raise self.bad(f"{path} ends past 2**64: address {address} + nbytes {nbytes}")
        if slot >= num_slots:
            raise self.bad(f"{path}.slot is {slot}; the generation table has {num_slots} slots")
        return {**numbers, "writable": self.flag(f"{path}.writable", fields["writable"])}, fields

    def flag(self, path: str, value: object) -> bool:
        """`value`, if it is true or false."""
        if not isinstance(value, bool):
            raise self.bad(f"{path} is {show(value)}; it must be true or false")
        return value

    def text(self, path: str, value: object, fits: Callable[[str], bool], must_be: str) -> str:
        """`value`, if it is a string that `fits`, which `must_be` says in words."""
        if not isinstance(value, str) or not fits(value):
            raise self.bad(f"{path} is {show(value)}; it must be {must_be}")
        return value

    def instance(self, value: object) -> str:
        """`value`, if it may be the `instance` of a transport: what no other has."""
        return self.text("instance", value, _is_instance, "32 hexadecimal digits")

    def printable(self, path: str, value: object) -> str:
        """`value`, if it may be called that, for people."""
        return self.text(path, value, _is_name, "1 to 64 printable characters")

    def bad(self, message: str) -> LLMException:
        """LLM_PARAM_INVALID, naming the document."""
        return invalid(f"{self.name}: {message}")


PEER: Final = Document("peer metadata", max_nbytes=32 << 20)
"""The metadata of a peer, of any transport."""


def _is_instance(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 64 and text.isprintable()
