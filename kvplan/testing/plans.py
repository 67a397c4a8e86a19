"""Plans in tests: observed while a test runs, held to a budget, and golden ones as JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from kvplan.planning import Plan, load_plan
from kvplan.planning.plan import OBSERVERS
from kvplan.planning.texts import plural
from kvplan.status import LLMException, invalid
from kvplan.validation import check_type


@contextmanager
def observe_plans() -> Iterator[list[Plan]]:
    """Collect every plan that is made in this process inside the `with` block, in order.

    Those of `kvplan.plan`, and those that engines make for their operations, in all threads. A plan
    that was read from a document, or is a part of another, was not made.
    """
    plans: list[Plan] = []
    OBSERVERS.append(plans.append)
    try:
        yield plans
    finally:
        # The very method: those of two empty lists are equal.
        at = next(i for i, it in enumerate(OBSERVERS) if getattr(it, "__self__", None) is plans)
        del OBSERVERS[at]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan may come to.

    Attributes:
        max_descriptors: descriptors of each plan; None: any number.
        max_nbytes: bytes that each plan moves; None: any number.
    """

    max_descriptors: int | None = None
    max_nbytes: int | None = None

    def __post_init__(self) -> None:
        limits = {"max_descriptors": self.max_descriptors, "max_nbytes": self.max_nbytes}
        if all(it is None for it in limits.values()):
            raise invalid("a budget has max_descriptors, max_nbytes, or both")
        for name, value in limits.items():
            if value is not None and check_type(name, value, int) < 0:
                raise invalid(f"{name}={value} must be None or >= 0")

    def failure(self, plans: list[Plan]) -> str:
        """What is to be said of plans of which some exceed it, or of none; empty: they keep it."""
        if not plans:
            return "no plan was made, so nothing was checked against the budget"
        excess = [(it, said) for it in plans if (said := self._excess(it))]
        if not excess:
            return ""
        worst, said = max(excess, key=lambda it: (it[0].num_descriptors, it[0].nbytes))
        lines = [f"{len(excess)} of {plural(len(plans), 'plan')} over budget: {said}"]
        lines += [f"also {it!r}" for it, _ in excess[:8] if it is not worst]
        return "\n".join([*lines, worst.explain()])

    def _excess(self, plan: Plan) -> str:
        said = [
            f"{found:,} {word}, max_{name}={limit:,}"
            for found, limit, word, name in (
                (plan.num_descriptors, self.max_descriptors, "descriptors", "descriptors"),
                (plan.nbytes, self.max_nbytes, "bytes", "nbytes"),
            )
            if limit is not None and found > limit
        ]
        return "; ".join(said)


MAX_NAME = 200
"""Bytes of a file's name, of the 255 that file systems have room for."""

NUMBERS_A_LINE = 10
"""Of a column of the segments, or of a block table."""


@dataclass
class GoldenPlans:
    """The golden plans of one test.

    Attributes:
        folder: where they are.
        test: its name, with which the names of the files begin.
        update: write what differs or is missing, rather than to fail.
        how: what says how to update, in failures.
        written: the files that were written.
    """

    folder: Path
    test: str
    update: bool = field(default=False, repr=False)
    how: str = field(default="update=True", repr=False)
    written: list[Path] = field(default_factory=list, repr=False)
    _used: dict[str, Plan] = field(default_factory=dict, repr=False)

    def path(self, name: str = "") -> Path:
        """Return the file of the golden plan of a name; each test and name has a file of its own.

        `test_it[NHD]` and "prefill" have `test_it-NHD+prefill.json`. Other characters than letters,
        digits, `_`, `.` and `-` become `-`; a checksum then keeps such names apart.
        """
        plain = re.fullmatch(r"([\w.]+)(?:\[([\w.-]+)\])?", self.test)
        said = "-".join(filter(None, plain.groups())) if plain else self.test.removesuffix("]")
        said = f"{said}+{name}" if name else said
        allowed = re.sub(r"[^\w.+-]", "-", said)
        if not (plain and re.fullmatch(r"[\w.-]*", name)) or len(said.encode()) > MAX_NAME:
            short = allowed.encode()[:MAX_NAME].decode(errors="ignore")
            checksum = crc32(f"{self.test}\n{name}".encode())
            allowed = f"{short}-{checksum:08x}"
        return self.folder / f"{allowed}.json"

    def __call__(self, plan: Plan, name: str = "") -> None:
        """Fail unless `plan` equals the golden one of this name; its segments, its options.

        Raises:
            AssertionError: it differs, is missing or is no plan; says how to write it.
            ValueError: another plan has had this name in the test.
        """
        __tracebackhide__ = True
        check_type("plan", plan, Plan)
        path = self.path(name)
        if self._used.setdefault(path.name, plan) != plan:
            raise ValueError(f"name={name!r} is already that of another plan of this test")
        if not (problem := self._problem(path, plan)):
            return
        if not self.update:
            raise AssertionError(f"{problem}\nIf it is as it should be: {self.how}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_plan(path, plan)
        self.written.append(path)

    def _problem(self, path: Path, plan: Plan) -> str:
        if not path.exists():
            return f"there is no golden plan {path}; the plan of the test is\n{plan.explain()}"
        try:
            golden = load_plan(path)
        except LLMException as error:
            return f"{error}"
        if golden == plan:
            return ""
        text = difference(golden, plan) or f"- {golden!r}\n+ {plan!r}"
        return f"the plan differs from {path}\n{text}"


def difference(old: object, new: object) -> str:
    """`old.diff(new)`; nothing where they are not two plans."""
    return old.diff(new) if isinstance(old, Plan) and isinstance(new, Plan) else ""


def write_plan(path: Path, plan: Plan) -> None:
    """Write what `load_plan` reads, with a line for each value, and for ten numbers of a column."""
    path.write_text(_text(plan.to_dict()) + "\n")


def _text(value: Any, indent: str = "") -> str:
    inner = f"{indent}  "
    if isinstance(value, dict) and value:
        rows = (f"{inner}{json.dumps(key)}: {_text(value[key], inner)}" for key in sorted(value))
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(it, list | dict) for it in value):
        items = (f"{inner}{_text(it, inner)}" for it in value)
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    if isinstance(value, list) and len(value) > NUMBERS_A_LINE:
        starts = range(0, len(value), NUMBERS_A_LINE)
        lines = (json.dumps(value[it : it + NUMBERS_A_LINE])[1:-1] for it in starts)
        return f"[\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}]"
    return json.dumps(value)
