"""Plans in tests: observed while a test runs, limited by a budget, compared with golden files."""

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
    """Collect every plan that this process makes inside the `with` block, in order.

    These are the plans of `kvplan.plan`, and of engines' operations in all threads. Plans that are
    read from documents, and parts of other plans, are not included.
    """
    plans: list[Plan] = []
    OBSERVERS.append(plans.append)
    try:
        yield plans
    finally:
        # Compare by identity: methods of two empty lists are equal.
        at = next(
            i
            for i, observer in enumerate(OBSERVERS)
            if getattr(observer, "__self__", None) is plans
        )
        del OBSERVERS[at]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a plan.

    Attributes:
        max_descriptors: descriptors of each plan; None: any number.
        max_nbytes: bytes that each plan moves; None: any number.
    """

    max_descriptors: int | None = None
    max_nbytes: int | None = None

    def __post_init__(self) -> None:
        limits = {"max_descriptors": self.max_descriptors, "max_nbytes": self.max_nbytes}
        if all(limit is None for limit in limits.values()):
            raise invalid("a budget has max_descriptors, max_nbytes, or both")
        for name, value in limits.items():
            if value is not None and check_type(name, value, int) < 0:
                raise invalid(f"{name}={value} must be None or >= 0")

    def failure(self, plans: list[Plan]) -> str:
        """Return the message if a plan exceeds the budget, or `plans` is empty; otherwise ""."""
        if not plans:
            return "no plan was made, so nothing was checked against the budget"
        excess = [(plan, problem) for plan in plans if (problem := self._excess(plan))]
        if not excess:
            return ""
        worst, problem = max(excess, key=lambda entry: (entry[0].num_descriptors, entry[0].nbytes))
        lines = [f"{len(excess)} of {plural(len(plans), 'plan')} over budget: {problem}"]
        lines += [f"also {plan!r}" for plan, _ in excess[:8] if plan is not worst]
        return "\n".join([*lines, worst.explain()])

    def _excess(self, plan: Plan) -> str:
        texts = [
            f"{found:,} {word}, max_{name}={limit:,}"
            for found, limit, word, name in (
                (plan.num_descriptors, self.max_descriptors, "descriptors", "descriptors"),
                (plan.nbytes, self.max_nbytes, "bytes", "nbytes"),
            )
            if limit is not None and found > limit
        ]
        return "; ".join(texts)


MAX_NAME = 200
"""Maximum bytes of a file's name before checksum and suffix; file systems allow 255 in all."""

NUMBERS_A_LINE = 10
"""Maximum numbers of a column or a block table in one line of a file."""


@dataclass
class GoldenPlans:
    """The golden plans of one test.

    Attributes:
        folder: the folder of the files.
        test: the name of the test, the beginning of the file names.
        update: True to write plans that differ or are missing, instead of failing.
        how: the command that updates the files, for messages.
        written: the files that were written.
    """

    folder: Path
    test: str
    update: bool = field(default=False, repr=False)
    how: str = field(default="update=True", repr=False)
    written: list[Path] = field(default_factory=list, repr=False)
    _used: dict[str, Plan] = field(default_factory=dict, repr=False)

    def path(self, name: str = "") -> Path:
        """Return the file of the golden plan `name`; each test and name has its own file.

        `test_it[NHD]` and "prefill" have `test_it-NHD+prefill.json`. Characters other than letters,
        digits, `_`, `.`, `+` and `-` become `-`; a checksum keeps unusual and long names apart.
        """
        plain = re.fullmatch(r"([\w.]+)(?:\[([\w.-]+)\])?", self.test)
        stem = "-".join(filter(None, plain.groups())) if plain else self.test.removesuffix("]")
        stem = f"{stem}+{name}" if name else stem
        allowed = re.sub(r"[^\w.+-]", "-", stem)
        if not (plain and re.fullmatch(r"[\w.-]*", name)) or len(stem.encode()) > MAX_NAME:
            short = allowed.encode()[:MAX_NAME].decode(errors="ignore")
            checksum = crc32(f"{self.test}\n{name}".encode())
            allowed = f"{short}-{checksum:08x}"
        return self.folder / f"{allowed}.json"

    def __call__(self, plan: Plan, name: str = "") -> None:
        """Fail unless `plan` equals the golden plan of this name, including segments and options.

        Raises:
            TypeError: `plan` is not a Plan.
            AssertionError: the golden plan differs, is missing or is not a plan; the message says
                how to write it.
            ValueError: the test has used this name for another plan.
        """
        __tracebackhide__ = True
        check_type("plan", plan, Plan)
        path = self.path(name)
        if self._used.setdefault(path.name, plan) != plan:
            raise ValueError(f"name={name!r} already belongs to another plan of this test")
        if not (problem := self._problem(path, plan)):
            return
        if not self.update:
            raise AssertionError(f"{problem}\nIf it is as it should be: {self.how}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_plan(path, plan)
        self.written.append(path)

    def _problem(self, path: Path, plan: Plan) -> str:
        if not path.exists():
            return f"golden plan {path} does not exist; the plan of the test is\n{plan.explain()}"
        try:
            golden = load_plan(path)
        except LLMException as error:
            return f"{error}"
        if golden == plan:
            return ""
        text = difference(golden, plan) or f"- {golden!r}\n+ {plan!r}"
        return f"the plan differs from {path}\n{text}"


def difference(old: object, new: object) -> str:
    """Return `old.diff(new)`, or "" unless both are plans."""
    return old.diff(new) if isinstance(old, Plan) and isinstance(new, Plan) else ""


def write_plan(path: Path, plan: Plan) -> None:
    """Write a file for `load_plan`, with one value, or ten numbers of a column, in each line."""
    path.write_text(_text(plan.to_dict()) + "\n")


def _text(value: Any, indent: str = "") -> str:
    inner = f"{indent}  "
    if isinstance(value, dict) and value:
        rows = (f"{inner}{json.dumps(key)}: {_text(value[key], inner)}" for key in sorted(value))
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        items = (f"{inner}{_text(item, inner)}" for item in value)
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    if isinstance(value, list) and len(value) > NUMBERS_A_LINE:
        starts = range(0, len(value), NUMBERS_A_LINE)
        lines = (json.dumps(value[start : start + NUMBERS_A_LINE])[1:-1] for start in starts)
        return f"[\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}]"
    return json.dumps(value)
