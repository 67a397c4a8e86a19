"""The Plan: an immutable, symbolic description of a transfer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from kvplan.planning.contents import model_note, one_line
from kvplan.planning.part import Part
from kvplan.planning.texts import DEFAULT_LIMIT, Format, Origin, nbytes_text
from kvplan.status import invalid
from kvplan.validation import check_index, check_type, shown

SCHEMA_VERSION: Final = 3

MAX_NAME: Final = 64
"""Maximum number of characters in the name of a part."""

OBSERVERS: list[Callable[[Plan], object]] = []
"""Functions that get each plan that is made: only in tests (`kvplan.testing.observe_plans`)."""


class PlacedPart(NamedTuple):
    """A part, and the numbers of its first descriptor and tensors in the plan."""

    part: Part
    descriptor: int
    src_tensor: int
    dst_tensor: int


class Plan:
    """A transfer to execute, without addresses. `kvplan.plan` and engines make plans.

    A plan has a part for each pair of caches: usually one. Several caches of one request, such as
    MLA's latent and its indexer, make a part for each name. A gather makes a part for each source
    that contributes. Ranges of addresses make a part for each pair of tensors.

    The plan numbers the descriptors and tensors of its parts in the order of the parts; see `Part`
    for the descriptors of a part.

    Args:
        parts: at least one. All pull, all push, or all copy; labels are unique.

    Raises:
        TypeError: an element is not a Part.
        LLMException: LLM_PARAM_INVALID: no part, an invalid name, two parts with one label, or
            parts of different directions.
    """

    parts: tuple[Part, ...]

    def __init__(self, parts: Iterable[Part]) -> None:
        vars(self)["parts"] = _checked(tuple(parts))

    @classmethod
    def made(cls, *parts: Part) -> Plan:
        """Return a new plan of valid parts, after showing the plan to `OBSERVERS`."""
        plan = object.__new__(cls)
        fields = vars(plan)
        fields["parts"] = parts
        if len(parts) == 1:
            fields["part"] = part = parts[0]
            fields["nbytes"], fields["reinterpret"] = part.nbytes, part.reinterpret
        if OBSERVERS:
            plan._observe()
        return plan

    def _observe(self) -> None:
        for observer in OBSERVERS:
            observer(self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a Plan cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a Plan cannot be changed")

    @cached_property
    def part(self) -> Part:
        """The only part.

        Raises:
            LLMException: LLM_PARAM_INVALID: the plan has several; use `parts`.
        """
        parts = self.parts
        if len(parts) > 1:
            labels = [part.label for part in parts]
            raise invalid(f"plan has {len(parts)} parts: {shown(labels)}; take one of plan.parts")
        return parts[0]

    @property
    def is_single(self) -> bool:
        """True for one part without a label, so that texts need not mention parts."""
        return len(self.parts) == 1 and not self.parts[0].label

    def by_part(self) -> dict[str, Plan]:
        """Return an unlabelled plan of each part, by label."""
        return {part.label: _of_valid((part.labelled(""),)) for part in self.parts}

    def for_layers(self, layers: range) -> Plan:
        """Return the plan that copies only the source layers in `layers`.

        Raises:
            TypeError: `layers` is not a range.
            LLMException: LLM_PARAM_INVALID: the plan has several parts, or `layers` is empty, of
                another step than 1, or not inside `part.src_layers`.
        """
        check_type("layers", layers, range)
        part = self.part
        own = part.src_layers
        if layers.step != 1 or not layers or layers.start < own.start or layers.stop > own.stop:
            raise invalid(
                f"layers={layers} must be a non-empty part, of step 1, of {own}{model_note(part)}"
            )
        per_layer = part.tensors_per_layer
        piece = slice((layers.start - own.start) * per_layer, (layers.stop - own.start) * per_layer)
        src_tensors, dst_tensors = part.src_tensors[piece], part.dst_tensors[piece]
        return _of_valid((replace(part, src_tensors=src_tensors, dst_tensors=dst_tensors),))

    def placed(self) -> Iterator[PlacedPart]:
        """Yield each part, in order, with the numbers of its first descriptor and tensors."""
        descriptor = src = dst = 0
        for part in self.parts:
            yield PlacedPart(part, descriptor, src, dst)
            descriptor += part.num_descriptors
            src += part.src.num_tensors
            dst += part.dst.num_tensors

    @cached_property
    def operation(self) -> str:
        """The planned call, such as "pull_blocks".

        Several parts, or one with a label: "pull_groups", "push_groups" or "copy_groups". Ranges of
        addresses: "pull_ranges" or "push_ranges".
        """
        first = self.parts[0]
        if self.is_single or first.operation.endswith("_ranges"):
            return first.operation
        return f"{_verb(first)}_groups"

    @cached_property
    def kind(self) -> str:
        """The kinds of all parts, each once: "B2B", or "B2B+C2C"."""
        return "+".join(sorted({part.kind for part in self.parts}))

    @cached_property
    def local(self) -> Literal["src", "dst", "both"]:
        """The side of this process: "dst" for a pull, "src" for a push, "both" for a copy."""
        return self.parts[0].local

    # If there is one part, `made` sets these two and `part`: every transfer asks for them.
    @cached_property
    def reinterpret(self) -> bool:
        """True if any part copies rows of different meaning as bytes."""
        return any(map(attrgetter("reinterpret"), self.parts))

    @cached_property
    def nbytes(self) -> int:
        """Bytes copied in total."""
        return sum(map(attrgetter("nbytes"), self.parts))

    @cached_property
    def num_tensor_pairs(self) -> int:
        """Tensor pairs of all parts."""
        return sum(map(attrgetter("num_tensor_pairs"), self.parts))

    @cached_property
    def num_descriptors(self) -> int:
        """Number of descriptors after lowering."""
        return sum(map(attrgetter("num_descriptors"), self.parts))

    def origin(self, descriptor: int) -> Origin:
        """Return where a descriptor came from; its tensors are counted within the part.

        Raises:
            TypeError: `descriptor` is not an int.
            LLMException: LLM_PARAM_INVALID: the descriptor does not exist.
        """
        check_index("descriptor", descriptor, self.num_descriptors)
        placed = next(
            placed for placed in reversed([*self.placed()]) if placed.descriptor <= descriptor
        )
        return placed.part.origin(descriptor - placed.descriptor)

    def missing_text(self, unconfirmed: Sequence[tuple[int, int]]) -> str:
        """Return the text that messages append to the number of unconfirmed descriptors."""
        return ""

    # The methods that show or write a plan import their modules when they are called: a program
    # that only transfers does not load them.

    def explain(
        self,
        format: Format = "tree",  # noqa: A002
        limit: int | None = DEFAULT_LIMIT,
    ) -> str:
        """Return the plan as text: "tree" or "table", with offsets instead of addresses.

        A tree lists layers, tensors and parts with equal rows once. A list longer than `limit`
        shows its first and last rows, and between them a summary.

        Args:
            format: "tree" or "table".
            limit: rows of each list. Below 8, only the first rows are shown and the others are
                counted. None: all rows; `explain_lines` yields them without one large text.

        Raises:
            TypeError: `limit` is not an int.
            LLMException: LLM_PARAM_INVALID: another format, or a limit below 1.
        """
        return "\n".join(self.explain_lines(format, limit))

    def explain_lines(
        self,
        format: Format = "tree",  # noqa: A002
        limit: int | None = None,
    ) -> Iterator[str]:
        """Return the lines of `explain` one by one, by default all of them.

        A table of millions of descriptors is never in memory as a whole. The arguments are those of
        `explain`, and are checked before the first line.

        Raises:
            TypeError: `limit` is not an int.
            LLMException: LLM_PARAM_INVALID: another format, or a limit below 1.
        """
        from kvplan.inspection.explain import explain_plan

        return explain_plan(self, format, limit)

    def diff(self, other: Plan) -> str:
        """Return how `other` differs, part by part, as text that ends with a verdict.

        Raises:
            TypeError: `other` is not a Plan.
        """
        from kvplan.inspection.diff import diff_plans

        return diff_plans(self, check_type("other", other, Plan))

    def assert_equivalent(self, other: Plan) -> None:
        """Fail unless `other` puts the same bytes into the same places, whatever its segments.

        Both plans must have the same labels in the same order, and caches of equal meaning and
        size. `==` also compares segments and options.

        Raises:
            TypeError: `other` is not a Plan.
            AssertionError: the plans differ; the message has the difference.
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        from kvplan.inspection.diff import is_equivalent

        if not is_equivalent(self, check_type("other", other, Plan)):
            raise AssertionError(f"{self!r} and\n{other!r} differ\n{self.diff(other)}")

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        diff: Plan | None = None,
        notes: Sequence[str] = (),
    ) -> str:
        """Return a picture of the plan as one self-contained HTML document.

        Args:
            path: a file to write; None: the document is only returned.
            diff: another plan; the document then has the text of `diff`, and both pictures.
            notes: sentences to show above the picture.

        Raises:
            TypeError: `diff` is not a Plan, or a note is not a str.
            OSError: `path` cannot be written.
        """
        from kvplan.inspection.page import to_html

        text = "" if diff is None else self.diff(check_type("diff", diff, Plan))
        return to_html(self, path, other=diff, difference=text, notes=notes)

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a picture of the plan as SVG without scripts, its parts below one another.

        Args:
            path: a file to write; None: the picture is only returned.

        Raises:
            OSError: `path` cannot be written.
        """
        from kvplan.inspection.svg import to_svg

        return to_svg(self, path)

    def _repr_html_(self) -> str:
        """Return the HTML that Jupyter shows."""
        from kvplan.inspection.page import cell

        return cell(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values; `from_dict` returns an equal plan."""
        from kvplan.planning.schema import to_dict

        return to_dict(self)

    @staticmethod
    def from_dict(document: dict[str, Any]) -> Plan:
        """Return the plan that `to_dict` wrote. All values are checked.

        Raises:
            LLMException: LLM_PARAM_INVALID: another schema version, or a document that is not a
                plan; the message names the field.
        """
        from kvplan.planning.schema import from_dict

        return from_dict(document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file for `kvplan.load_plan` and the command `kvplan`.

        Raises:
            OSError: the file cannot be written.
        """
        from kvplan.planning.schema import save

        save(self, path)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the parts' labels and fingerprints; equal for equal plans."""
        import hashlib  # loads OpenSSL

        if self.is_single:
            return self.parts[0].fingerprint
        parts = (f"{part.label}\n{part.fingerprint}\n" for part in self.parts)
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.parts == other.parts and all(
            a.label == b.label for a, b in zip(self.parts, other.parts, strict=True)
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[type[Plan], tuple[tuple[Part, ...]]]:
        return Plan, (self.parts,)

    def __repr__(self) -> str:
        if self.is_single:
            return f"<Plan {one_line(self.parts[0])}>"
        return (
            f"<Plan {self.operation} {self.kind} {', '.join(part.label for part in self.parts)}: "
            f"{self.num_descriptors} desc, {nbytes_text(self.nbytes)}>"
        )


def _of_valid(parts: tuple[Part, ...]) -> Plan:
    """Return a plan of parts that need no check."""
    plan = object.__new__(Plan)
    vars(plan)["parts"] = parts
    return plan


def _checked(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Refuse parts that cannot form a plan."""
    if not parts:
        raise invalid("parts is empty; a plan has at least one")
    labels: set[str] = set()
    for index, part in enumerate(parts):
        check_type(f"parts[{index}]", part, Part)
        if part.name:
            check_name(part.name)
        if part.label in labels:
            raise invalid(f"parts[{index}] repeats the label {shown(part.label)} of an earlier one")
        labels.add(part.label)
    verbs = {_verb(part): part for part in parts}
    if len(verbs) > 1:
        listed = ", ".join(f"{shown(part.label)} is a {verb}" for verb, part in verbs.items())
        raise invalid(f"parts: {listed}; one transfer has one direction")
    return parts


def check_name(name: object) -> None:
    """Refuse a name of a part that does not fit into a printed line."""
    if type(name) is not str:
        check_type("name of a part", name, str)
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise invalid(f"name {shown(name)} must have 1 to {MAX_NAME} printable characters")


def _verb(part: Part) -> str:
    verb = part.operation.partition("_")[0]
    return "copy" if verb == "swap" else verb
