"""One transfer of several groups: caches of other shapes, data types or block tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvplan.inspection.units import DEFAULT_LIMIT, Format, nbytes_text, plural
from kvplan.planning.plan import OBSERVERS, SCHEMA_VERSION, Origin, Plan
from kvplan.status import LLMException, invalid
from kvplan.validation import check_index, check_mapping, check_type, shown

if TYPE_CHECKING:
    import os

    from kvplan.inspection.cost import Estimate, TransportCost

MAX_GROUP_NAME = 64
"""Characters of a group's name."""


class Part(NamedTuple):
    """A group, and where its descriptors and its tensors begin among those of all groups."""

    name: str
    plan: Plan
    descriptor: int
    src_tensor: int
    dst_tensor: int


@dataclass(frozen=True, repr=False, eq=False)
class GroupPlan:
    """What to copy of several groups, in one submission. Made by `plan_groups`.

    A group is what a request has in one pair of caches: the latent of MLA or its indexer, values or
    their scales, layers with a sliding window or without. Each has a plan of its own. Descriptors
    are those of the first group, then those of the second, and so on; so are tensors: a side of
    the transfer has the tensors of each group's side, one group after another.

    Attributes:
        groups: the plan of each group, by name, in order.
    """

    groups: Mapping[str, Plan]

    def __post_init__(self) -> None:
        _check_groups(self.groups)
        object.__setattr__(self, "groups", MappingProxyType(dict(self.groups)))

    @property
    def operation(self) -> str:
        """`pull_groups`, `push_groups` or `copy_groups`."""
        return f"{_verb(next(iter(self.groups.values())))}_groups"

    @property
    def kind(self) -> str:
        """The kinds of the groups' plans, each once: "B2B", or "B2B+C2C"."""
        return "+".join(sorted({plan.kind for plan in self.groups.values()}))

    @property
    def local(self) -> Literal["src", "dst", "both"]:
        """Which side is this process's own, as of each group's plan."""
        return next(iter(self.groups.values())).local

    @property
    def reinterpret(self) -> bool:
        """Whether one of the groups copies rows that mean different things as bytes."""
        return any(plan.reinterpret for plan in self.groups.values())

    @cached_property
    def num_tensor_pairs(self) -> int:
        """Tensor pairs of all groups."""
        return sum(plan.num_tensor_pairs for plan in self.groups.values())

    @cached_property
    def num_descriptors(self) -> int:
        """Descriptors that lowering will make."""
        return sum(plan.num_descriptors for plan in self.groups.values())

    @cached_property
    def nbytes(self) -> int:
        """Bytes copied in all."""
        return sum(plan.nbytes for plan in self.groups.values())

    def parts(self) -> Iterator[Part]:
        """Each group, in order."""
        first = src = dst = 0
        for name, plan in self.groups.items():
            yield Part(name, plan, first, src, dst)
            first += plan.num_descriptors
            src += plan.src.num_tensors
            dst += plan.dst.num_tensors

    def origin(self, descriptor: int) -> Origin:
        """Return where a descriptor came from, with its group; tensors count within that.

        Raises:
            TypeError: `descriptor` is no int.
            LLMException: LLM_PARAM_INVALID if there is no such descriptor.
        """
        check_index("descriptor", descriptor, self.num_descriptors)
        part = next(it for it in reversed([*self.parts()]) if it.descriptor <= descriptor)
        return part.plan.origin(descriptor - part.descriptor)._replace(group=part.name)

    def explain(
        self,
        format: Format = "tree",  # noqa: A002
        limit: int | None = DEFAULT_LIMIT,
        *,
        transport: str | TransportCost | None = None,
    ) -> str:
        """Return the plan as text for people: a head, and each group as `Plan.explain` says it.

        Groups of equal plans are one, under all of their names; blocks that a group has like one
        before it are not listed again.

        Arguments and errors as for `Plan.explain`; `transport`: how all groups would move over it.
        """
        return "\n".join(self.explain_lines(format, limit, transport=transport))

    def explain_lines(
        self,
        format: Format = "tree",  # noqa: A002
        limit: int | None = None,
        *,
        transport: str | TransportCost | None = None,
    ) -> Iterator[str]:
        """Return the lines of `explain` one by one, by default all of them.

        Arguments and errors as for `Plan.explain_lines`.
        """
        # As in Plan, not at the top: text for people.
        from kvplan.inspection.copy_ways import copied_lines
        from kvplan.inspection.cost import cost_of
        from kvplan.inspection.groups import explain_groups

        head = [
            f"{self.operation}  {self.kind}   {plural(len(self.groups), 'group')}   "
            f"plan {self.fingerprint[:6]}",
            f"  {plural(self.num_descriptors, 'descriptor')} | {nbytes_text(self.nbytes)}",
            *(f"  {line}" for line in copied_lines(self)),
        ]
        if transport is not None:
            head.append(f"  {cost_of(transport).outline(self)}")
        return chain(head, explain_groups(self.groups, format, limit))

    def estimate(self, transport: str | TransportCost) -> Estimate:
        """Return how long the whole is expected to take; see `Plan.estimate`."""
        from kvplan.inspection.cost import cost_of

        return cost_of(transport).estimate(self)

    def diff(self, other: GroupPlan) -> str:
        """Return how `other` differs, group by group, as text that ends in a verdict.

        Raises:
            TypeError: `other` is no GroupPlan.
        """
        from kvplan.inspection.groups import diff_groups

        return diff_groups(self.groups, check_type("other", other, GroupPlan).groups)

    def assert_equivalent(self, other: GroupPlan) -> None:
        """Fail unless `other` has the same groups in the same order, each equivalent.

        Raises:
            TypeError: `other` is no GroupPlan.
            AssertionError: with the difference.
        """
        __tracebackhide__ = True
        from kvplan.inspection.diff import is_equivalent

        check_type("other", other, GroupPlan)
        if [*self.groups] != [*other.groups] or not all(
            map(is_equivalent, self.groups.values(), other.groups.values())
        ):
            raise AssertionError(f"{self!r} and\n{other!r} differ\n{self.diff(other)}")

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        diff: GroupPlan | None = None,
        notes: Sequence[str] = (),
    ) -> str:
        """Return a picture of all groups as one HTML document; see `Plan.to_html`.

        Raises:
            TypeError: `diff` is no GroupPlan.
            OSError: `path` cannot be written to.
        """
        from kvplan.inspection.page import to_html

        text = "" if diff is None else self.diff(check_type("diff", diff, GroupPlan))
        return to_html(self, path, other=diff, difference=text, notes=notes)

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a picture for documents, the groups below one another; see `Plan.to_svg`.

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
        groups = {name: plan.to_dict() for name, plan in self.groups.items()}
        return {"schema_version": SCHEMA_VERSION, "groups": groups}

    @staticmethod
    def from_dict(document: dict[str, Any]) -> GroupPlan:
        """Return the plan that `to_dict` wrote.

        Raises:
            TypeError: `document` is no dict.
            LLMException: LLM_PARAM_INVALID for another schema version, or a document that is no
                plan of groups (naming the field).
        """
        check_type("document", document, dict)
        groups, version = document.get("groups"), document.get("schema_version")
        if document.keys() != {"schema_version", "groups"} or not isinstance(groups, dict):
            raise invalid(
                "document: a plan of groups has schema_version and groups, a plan for each name; "
                f"this has {shown(sorted(map(str, document)))}"
            )
        if version != SCHEMA_VERSION:
            raise invalid(f"schema_version={shown(version)} must be {SCHEMA_VERSION}")
        plans = {}
        for name, it in groups.items():
            try:
                plans[name] = Plan.from_dict(it)
            except LLMException as error:
                raise invalid(f"groups[{shown(name)}]: {error.args[0]}") from None
        return GroupPlan(plans)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, which `kvplan.load_plan` and the command `kvplan` read.

        Raises:
            OSError: the file cannot be written.
        """
        from kvplan.planning.files import save

        save(self, path)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the groups' names and fingerprints; equal for equal plans."""
        import hashlib  # loads OpenSSL

        parts = (f"{name}\n{plan.fingerprint}\n" for name, plan in self.groups.items())
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GroupPlan):
            return NotImplemented
        return [*self.groups.items()] == [*other.groups.items()]

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[type[GroupPlan], tuple[dict[str, Plan]]]:
        return GroupPlan, (dict(self.groups),)

    def __repr__(self) -> str:
        return (
            f"<GroupPlan {self.operation} {self.kind} {', '.join(self.groups)}: "
            f"{self.num_descriptors} desc, {nbytes_text(self.nbytes)}>"
        )


AnyPlan = Plan | GroupPlan
"""What is submitted."""


def plan_groups(groups: Mapping[str, Plan]) -> GroupPlan:
    """Return the plans of several groups as one, which is submitted as one.

    Args:
        groups: the plan of each group, by a name of at most 64 printable characters: what
            `explain` and errors call it. All pull, all push, or all copy.

    Raises:
        TypeError: a name that is not text, or a value that is no plan.
        LLMException: LLM_PARAM_INVALID: no group, a bad name, or plans of different directions.
    """
    plan = GroupPlan(groups)
    for observe in OBSERVERS:
        observe(plan)
    return plan


def _check_groups(groups: Mapping[str, Plan]) -> None:
    check_mapping("groups", groups)
    if not groups:
        raise invalid("groups is empty; a transfer has at least one")
    for name, plan in groups.items():
        check_group_name(name)
        check_type(f"groups[{shown(name)}]", plan, Plan)
    verbs = {_verb(plan): name for name, plan in groups.items()}
    if len(verbs) > 1:
        said = ", ".join(f"{shown(name)} is a {verb}" for verb, name in verbs.items())
        raise invalid(f"groups: {said}; one transfer has one direction")


def check_group_name(name: str) -> None:
    """Refuse what cannot be printed in a line."""
    check_type("name of a group", name, str)
    if not 1 <= len(name) <= MAX_GROUP_NAME or not name.isprintable():
        raise invalid(
            f"groups: the name {shown(name)} must have 1 to {MAX_GROUP_NAME} printable characters"
        )


def _verb(plan: Plan) -> str:
    verb = plan.operation.partition("_")[0]
    return "copy" if verb == "swap" else verb
