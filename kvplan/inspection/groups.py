"""Plans of several groups as text: what groups have in common stands there once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvplan.inspection.diff import diff, verdict
from kvplan.inspection.explain import explain_lines
from kvplan.inspection.units import Format, fit

if TYPE_CHECKING:
    from kvplan.planning.plan import Plan

    Groups = Mapping[str, Plan]


def explain_groups(
    groups: Groups,
    format: Format,  # noqa: A002
    limit: int | None,
) -> Iterator[str]:
    """Return the lines of each group, below its name; equal plans are one.

    Raises, before the first line:
        LLMException: as `explain_lines`.
    """
    parts: list[tuple[str, Iterator[str]]] = []
    seen: list[tuple[Plan, list[str]]] = []
    for name, plan in groups.items():
        if (of := next((of for it, of in seen if _same(it, plan)), None)) is not None:
            of.append(name)
        else:
            seen.append((plan, [name]))
    for index, (plan, of) in enumerate(seen):
        like = next((names for it, names in seen[:index] if _same_rows(it, plan)), None)
        same_as = "" if like is None else f"group {like[0]}"
        parts.append((_named(of), explain_lines(plan, format, limit, same_as=same_as)))

    def lines() -> Iterator[str]:
        for named, text in parts:
            yield from fit(named, indent="  ")
            yield from (f"  {line}" for line in text)

    return lines()


def _same(a: Plan, b: Plan) -> bool:
    """Whether nothing that is said of them differs: equal plans of caches of the same names."""
    return (
        a == b
        and (a.src.name, a.dst.name, a.src.way, a.dst.way)
        == (b.src.name, b.dst.name, b.src.way, b.dst.way)
        and _same_tables(a, b)
    )


def _same_tables(a: Plan, b: Plan) -> bool:
    if a.tables is None or b.tables is None:
        return a.tables is b.tables
    return a.tables[2:] == b.tables[2:] and all(map(np.array_equal, a.tables[:2], b.tables[:2]))


def _named(names: list[str]) -> str:
    """`group latent`, or `groups 0, 1, 2`."""
    return f"group{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _same_rows(a: Plan, b: Plan) -> bool:
    """Whether both have the same segments, counted in rows, for the same tokens of the request."""
    if a.tables is None or b.tables is None or len(a.segments) != len(b.segments):
        return False
    if a.split or b.split or a.segments.repeats or b.segments.repeats:
        return False
    if (a.kind, a.operation) != (b.kind, b.operation) or any(
        getattr(a, side).extent("token") != getattr(b, side).extent("token")
        or getattr(a, side).row != getattr(b, side).row
        for side in ("src", "dst")
    ):
        return False
    sides = (("src_offsets", "src"), ("dst_offsets", "dst"), ("nbytes", "dst"))
    for name, side in sides:
        strides = [np.uint64(getattr(it, side).stride) for it in (a, b)]
        columns = [getattr(it.segments, name) for it in (a, b)]
        if any((column % stride).any() for column, stride in zip(columns, strides, strict=True)):
            return False
        if not np.array_equal(columns[0] // strides[0], columns[1] // strides[1]):
            return False
    return _same_tables(a, b)


def diff_groups(old: Groups, new: Groups) -> str:
    """Return what changed, group by group, as text that ends in a verdict."""
    lines: list[str] = []
    changes: dict[str, str] = {}  # the text of a change, and the group that has it first
    verdicts: dict[str, list[str]] = {}
    same: list[str] = []  # groups, one after the other, in which nothing changed
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if before is not None and before == after:
            same.append(name)
            continue
        lines += _identical(same)
        same = []
        if before is None or after is None:
            said = f"only in the {'old' if after is None else 'new'} plan"
            lines += fit(f"group {name}: {'-' if after is None else '+'} {before or after!r}")
            verdicts.setdefault(said, []).append(name)
            continue
        verdicts.setdefault(f": {verdict(before, after)}", []).append(name)
        text = diff(before, after)
        if (first := changes.setdefault(text, name)) != name:
            lines.append(f"group {name}: same change as in group {first}")
        else:
            lines += [f"group {name}", *(f"  {line}" for line in text.splitlines())]
    lines += _identical(same)
    odd = [
        f"{_named(names)}{'' if said.startswith(':') else ' '}{said}"
        for said, names in verdicts.items()
    ]
    if not odd and [*old] != [*new]:
        odd.append("the groups are in another order")
    lines += fit(f"verdict: {'; '.join(odd) or 'identical'}")
    return "\n".join(lines)


def _identical(names: list[str]) -> list[str]:
    return fit(f"{_named(names)}: identical", indent="  ") if names else []
