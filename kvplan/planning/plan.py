"""The Plan: an immutable, symbolic recipe for a transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from kvplan.inspection.contents import model_note
from kvplan.inspection.units import DEFAULT_LIMIT, Format, nbytes_text
from kvplan.planning.part import Origin, Part
from kvplan.status import invalid
from kvplan.validation import check_index, check_type, shown

if TYPE_CHECKING:
    import os

    from kvplan.planning.ranges import Ranges

SCHEMA_VERSION: Final = 3

MAX_NAME: Final = 64
"""Characters of the name of a part."""

OBSERVERS: list[Callable[[Plan], object]] = []
"""Called with each plan that is made. Empty but in tests: `kvplan.testing.observe_plans`."""


class PlacedPart(NamedTuple):
    """A part, and where its descriptors and its tensors begin among those of the plan."""

    part: Part
    descriptor: int
    src_tensor: int
    dst_tensor: int


class Plan:
    """What to copy, symbolically. Made by `kvplan.plan` and by an engine; read with `explain`.

    A plan has a part for each pair of caches: usually one. Several caches of one request, such as
    MLA's latent and its indexer, make a part for each name; a gather makes one for each source that
    gives something; ranges of addresses make one for each pair of tensors that ranges go between.

    Descriptors are those of the first part, then those of the second, and so on; so are tensors: a
    side of the transfer has the tensors of each part's side, one part after another. Descriptor i
    of a part is segment `i % len(segments)` of tensor pair `i // len(segments)`: layer by layer,
    tensor by tensor, segment by segment.

    Args:
        parts: at least one; all pull, all push, or all copy; no two of one label.

    Raises:
        TypeError: what is no part.
        LLMException: LLM_PARAM_INVALID: no part, a bad name, two of one label, or parts of
            different directions.
    """

    parts: tuple[Part, ...]
    ranges: Ranges | None = None  # of a plan of ranges: they are planned when somebody looks

    def __init__(self, parts: Iterable[Part]) -> None:
        vars(self)["parts"] = _checked(tuple(parts))

    @classmethod
    def made(cls, *parts: Part) -> Plan:
        """Return a new plan of parts that need no check, and show it to `OBSERVERS`."""
        plan = object.__new__(cls)
        vars(plan)["parts"] = parts
        if OBSERVERS:
            plan.observe()
        return plan

    def observe(self) -> None:
        """Show a plan that has just been made to `OBSERVERS`."""
        for observer in OBSERVERS:
            observer(self)

    if not TYPE_CHECKING:  # as to mypy: every field is there

        def __getattr__(self, name: str) -> Any:
            """Make the parts of ranges, now that one asks."""
            if name != "parts" or "made_parts" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            made = vars(self)["parts"] = vars(self)["made_parts"]()
            return made

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a Plan cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a Plan cannot be changed")

    @property
    def part(self) -> Part:
        """The only part.

        Raises:
            LLMException: LLM_PARAM_INVALID: the plan has several; `parts` are all of them.
        """
        parts = self.parts
        if len(parts) > 1:
            labels = [it.label for it in parts]
            raise invalid(f"plan has {len(parts)} parts: {shown(labels)}; take one of plan.parts")
        return parts[0]

    @property
    def is_single(self) -> bool:
        """Whether there is one part without a label: then texts do not speak of parts."""
        return len(self.parts) == 1 and not self.parts[0].label

    def by_part(self) -> dict[str, Plan]:
        """Return each part as a plan of its own, without a name, by its label."""
        return {part.label: Plan((part.labelled(""),)) for part in self.parts}

    def for_layers(self, layers: range) -> Plan:
        """Return the plan that copies only the source layers in `layers` (step 1).

        Raises:
            TypeError: `layers` is no range.
            LLMException: LLM_PARAM_INVALID: several parts, or a layer that is not one of the
                `src_layers` of the part.
        """
        check_type("layers", layers, range)
        part = self.part
        own = part.src_layers
        if layers.step != 1 or not layers or layers.start < own.start or layers.stop > own.stop:
            raise invalid(
                f"layers={layers} must be a non-empty part, of step 1, of {own}{model_note(part)}"
            )
        t = part.tensors_per_layer
        some = slice((layers.start - own.start) * t, (layers.stop - own.start) * t)
        src_tensors, dst_tensors = part.src_tensors[some], part.dst_tensors[some]
        return Plan((replace(part, src_tensors=src_tensors, dst_tensors=dst_tensors),))

    def placed(self) -> Iterator[PlacedPart]:
        """Each part, in order, with where its descriptors and tensors begin."""
        descriptor = src = dst = 0
        for part in self.parts:
            yield PlacedPart(part, descriptor, src, dst)
            descriptor += part.num_descriptors
            src += part.src.num_tensors
            dst += part.dst.num_tensors

    @cached_property
    def operation(self) -> str:
        """What the plan is of: that of the part, such as "pull_blocks".

        Of several parts, or one with a name: "pull_groups", "push_groups" or "copy_groups". Of
        ranges: "pull_ranges" or "push_ranges".
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
        """Which side is this process's own: a pull writes it, a push reads it."""
        return self.parts[0].local

    @cached_property
    def reinterpret(self) -> bool:
        """Whether a part copies rows that mean different things as bytes."""
        return any(map(attrgetter("reinterpret"), self.parts))

    @cached_property
    def num_tensor_pairs(self) -> int:
        """Tensor pairs of all parts."""
        return sum(part.num_tensor_pairs for part in self.parts)

    @cached_property
    def num_descriptors(self) -> int:
        """Descriptors that lowering will make."""
        return sum(part.num_descriptors for part in self.parts)

    @cached_property
    def nbytes(self) -> int:
        """Bytes copied in all."""
        return sum(map(attrgetter("nbytes"), self.parts))

    def origin(self, descriptor: int) -> Origin:
        """Return where a descriptor came from; tensors count within its part.

        Raises:
            TypeError: `descriptor` is no int.
            LLMException: LLM_PARAM_INVALID if there is no such descriptor.
        """
        check_index("descriptor", descriptor, self.num_descriptors)
        at = next(it for it in reversed([*self.placed()]) if it.descriptor <= descriptor)
        return at.part.origin(descriptor - at.descriptor)

    def explain(
        self,
        format: Format = "tree",  # noqa: A002
        limit: int | None = DEFAULT_LIMIT,
    ) -> str:
        """Return the plan as text for people: "tree" or "table"; offsets, no addresses.

        What is the same for several layers, tensors or parts stands there once. Of a list longer
        than `limit` the first and the last rows are shown, and between them what it comes to.

        Args:
            limit: rows of each list; below 8 the first rows only, and how many more there are.
                None: all of them; `explain_lines` has them without one large text.

        Raises:
            LLMException: LLM_PARAM_INVALID: another format, or a limit below 1.
        """
        return "\n".join(self.explain_lines(format, limit))

    def explain_lines(
        self,
        format: Format = "tree",  # noqa: A002
        limit: int | None = None,
    ) -> Iterator[str]:
        """Return the lines of `explain` one by one, by default all of them.

        A table of millions of descriptors is never in memory as a whole.

        Arguments and errors as for `explain`; what is wrong is refused before the first line.
        """
        # Text for people is not loaded at the top: those who only transfer pay nothing for it.
        from kvplan.inspection.explain import explain_plan

        return explain_plan(self, format, limit)

    def diff(self, other: Plan) -> str:
        """Return how `other` differs, part by part, as text that ends in a verdict.

        Raises:
            TypeError: `other` is no Plan.
        """
        from kvplan.inspection.diff import diff_plans

        return diff_plans(self, check_type("other", other, Plan))

    def assert_equivalent(self, other: Plan) -> None:
        """Fail unless `other` puts the same bytes into the same places, in whatever segments.

        Both must have parts of the same labels in the same order. The verdict of `diff` is then
        "identical" or "equivalent". `plan == other` asks for more: the same segments and options.

        Raises:
            TypeError: `other` is no Plan.
            AssertionError: with the difference.
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
        """Return a picture of the plan as one HTML document, which asks for nothing else.

        Args:
            path: a file to write it to; None: it is only returned.
            diff: another plan; the document then has the text of `diff`, and both pictures.
            notes: sentences of yours, shown above the picture.

        Raises:
            TypeError: `diff` is no Plan.
            OSError: `path` cannot be written to.
        """
        from kvplan.inspection.page import to_html

        text = "" if diff is None else self.diff(check_type("diff", diff, Plan))
        return to_html(self, path, other=diff, difference=text, notes=notes)

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a picture of the plan for documents, its parts below one another: SVG, no script.

        Args:
            path: a file to write it to; None: it is only returned.

        Raises:
            OSError: `path` cannot be written to.
        """
        from kvplan.inspection.svg import to_svg

        return to_svg(self, path)

    def _repr_html_(self) -> str:
        """What Jupyter shows."""
        from kvplan.inspection.page import cell

        return cell(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values; `from_dict` gives an equal plan back."""
        from kvplan.planning.schema import to_dict  # it builds plans: not at the top

        return to_dict(self)

    @staticmethod
    def from_dict(document: dict[str, Any]) -> Plan:
        """Return the plan that `to_dict` wrote, of this or an older schema version.

        Raises:
            TypeError: `document` is no dict.
            LLMException: LLM_PARAM_INVALID for another schema version, or a document that is no
                plan (naming the field).
        """
        from kvplan.planning.schema import from_dict

        return from_dict(document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, which `kvplan.load_plan` and the command `kvplan` read.

        Raises:
            OSError: the file cannot be written.
        """
        from kvplan.planning.files import save

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
        from kvplan.inspection.explain import one_line

        if self.is_single:
            return f"<Plan {one_line(self.parts[0])}>"
        return (
            f"<Plan {self.operation} {self.kind} {', '.join(it.label for it in self.parts)}: "
            f"{self.num_descriptors} desc, {nbytes_text(self.nbytes)}>"
        )


def _checked(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Refuse parts that are no plan."""
    if not parts:
        raise invalid("parts is empty; a plan has at least one")
    labels: set[str] = set()
    for index, part in enumerate(parts):
        check_type(f"parts[{index}]", part, Part)
        if part.name:
            check_name(part.name)
        if part.label in labels:
            raise invalid(f"parts[{index}] has the label {shown(part.label)}, as one before it")
        labels.add(part.label)
    verbs = {_verb(part): part for part in parts}
    if len(verbs) > 1:
        said = ", ".join(f"{shown(part.label)} is a {verb}" for verb, part in verbs.items())
        raise invalid(f"parts: {said}; one transfer has one direction")
    return parts


def check_name(name: object) -> None:
    """Refuse a name of a part that cannot be printed in a line.

    Raises:
        TypeError: no text.
        LLMException: LLM_PARAM_INVALID: of another length than 1 to 64, or not printable.
    """
    check_type("name of a part", name, str)
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise invalid(f"name {shown(name)} must have 1 to {MAX_NAME} printable characters")


def _verb(part: Part) -> str:
    verb = part.operation.partition("_")[0]
    return "copy" if verb == "swap" else verb
