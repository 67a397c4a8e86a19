"""The pytest plugin of kvplan: differences of plans, fixtures, budgets and golden plans.

pytest loads it by itself where kvplan is installed (`-p no:kvplan` leaves it out). It imports
nothing of kvplan, nor NumPy, until a test uses it: those who do not use it pay nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvplan import CacheDesc, Plan
    from kvplan.testing import BlockTables, Budget, Executed, GoldenPlans

_budgets = pytest.StashKey["tuple[Budget, ExitStack]"]()
_tables = pytest.StashKey["BlockTables"]()
_plans = pytest.StashKey["list[Plan]"]()

WRITTEN = "kvplan_golden_plan_written"
"""The property of a test's report that names a file; xdist's workers have it sent."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the command line."""
    group = parser.getgroup("kvplan", "kvplan: plans of KV cache transfers")
    group.addoption(
        "--kvplan-update",
        action="store_true",
        help="write golden plans that differ or are missing, rather than to fail",
    )
    group.addoption(
        "--kvplan-seed",
        type=int,
        default=0,
        metavar="N",
        help="other random block tables in every test (default: 0)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Say what the mark is."""
    config.addinivalue_line(
        "markers",
        "kvplan(max_descriptors=None, max_nbytes=None): fail if a plan that is made in the test, "
        "by kvplan's functions or by an engine, is over this budget, or if none is made",
    )


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Show how two plans differ where a test asserts that they are equal."""
    # Where nothing of kvplan was imported there is no plan.
    if op != "==" or "kvplan.planning.plan" not in sys.modules:
        return None
    from kvplan.testing import difference

    lines = difference(left, right).splitlines()
    if not lines:
        return None
    # pytest cuts what is long, so what it comes to is first; -vv shows all.
    first = [line for line in lines if line.startswith(("  verdict:", "verdict:", "  cause "))]
    return [f"{left!r} == {right!r}", *first[::-1], *(line for line in lines if line not in first)]


# Plain hooks around those of pytest: a wrapper would need pytest 8, and break older ones for all.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin to observe plans, where a test has a budget."""
    if (mark := item.get_closest_marker("kvplan")) is not None:
        item.stash[_budgets] = _budget(mark), ExitStack()
        _observe(item, item.stash[_budgets][1])


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Check the budget of a test that has passed."""
    if _budgets in item.stash and (text := item.stash[_budgets][0].failure(item.stash[_plans])):
        pytest.fail(f"kvplan: {text}", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Observe no longer."""
    if _budgets in item.stash:
        item.stash[_budgets][1].close()
        del item.stash[_budgets]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    """Show the line of the test at which kvplan refused something, and the test's block tables."""
    hidden = _own_modules(call.excinfo) if call.excinfo is not None else []
    for module in hidden:
        module["__tracebackhide__"] = True
    outcome = yield
    for module in hidden:
        module.pop("__tracebackhide__", None)
    report = outcome.get_result()
    if report.failed and _tables in item.stash and item.stash[_tables].made:
        seed = item.config.getoption("--kvplan-seed")
        text = "\n".join([f"--kvplan-seed={seed}", *item.stash[_tables].made])
        report.sections.append(("kvplan_block_tables", text))


def _own_modules(failure: pytest.ExceptionInfo[BaseException]) -> list[dict[str, Any]]:
    """Return the modules of kvplan in a traceback, if one of them refused something.

    An exception without a `raise` of kvplan may be an error of kvplan, and keeps its frames.
    """
    modules = [item.frame.f_globals for item in failure.traceback]
    own = [module for module in modules if module.get("__name__", "").partition(".")[0] == "kvplan"]
    if not own or modules[-1] is not own[-1]:
        return []
    return own if str(failure.traceback[-1].statement).lstrip().startswith("raise ") else []


def _budget(mark: pytest.Mark) -> Budget:
    from kvplan.status import LLMException
    from kvplan.testing import Budget

    if mark.args:
        pytest.fail(f"@pytest.mark.kvplan: name the arguments {mark.args}", pytrace=False)
    try:
        return Budget(**mark.kwargs)
    except (LLMException, TypeError) as error:
        said = str(error)
    pytest.fail(f"@pytest.mark.kvplan: {said}", pytrace=False)


def _observe(item: pytest.Item, stack: ExitStack) -> list[Plan]:
    from kvplan.testing import observe_plans

    if _plans not in item.stash:
        item.stash[_plans] = stack.enter_context(observe_plans())
        stack.callback(item.stash.__delitem__, _plans)
    return item.stash[_plans]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the golden plans that were written."""
    for report in terminalreporter.stats.get("", []):  # of setups and teardowns that passed
        if report.when == "teardown":
            for name, path in report.user_properties:
                if name == WRITTEN:
                    terminalreporter.write_line(f"kvplan: wrote {path}")


@pytest.fixture
def kvplan_desc() -> Callable[..., CacheDesc]:
    """Describe a cache of a usual shape: `kvplan_desc("HND", blocks=64, layers=2, heads=8)`.

    Arguments as for `kvplan.testing.make_desc`.
    """
    from kvplan.testing import make_desc

    return make_desc


@pytest.fixture
def kvplan_block_tables(request: pytest.FixtureRequest) -> BlockTables:
    """Random block tables: `kvplan_block_tables(64, 12)`, `kvplan_block_tables(desc, 12, 5)`.

    They are the same in each run of a test, and printed where it fails; `--kvplan-seed=N` makes
    others. Arguments as for `kvplan.testing.BlockTables`.
    """
    from kvplan.testing import BlockTables

    given = request.config.getoption("--kvplan-seed")
    tables = BlockTables(crc32(f"{request.node.nodeid} {given}".encode()))
    request.node.stash[_tables] = tables
    return tables


@pytest.fixture
def kvplan_reference() -> Callable[..., Executed]:
    """Execute a plan in NumPy, without native code: `kvplan_reference(plan).dst[0][block]`.

    Elements at src are random and never 0; those at dst are 0 where nothing was written.
    Arguments as for `kvplan.testing.run_reference`.
    """
    from kvplan.testing import run_reference

    return run_reference


@pytest.fixture
def kvplan_tokens() -> Callable[..., NDArray[Any]]:
    """Return what a cache holds of a request, by token: `kvplan_tokens(desc, moved.dst, blocks)`.

    Arguments as for `kvplan.testing.request_tokens`.
    """
    from kvplan.testing import request_tokens

    return request_tokens


@pytest.fixture
def kvplan_plans(request: pytest.FixtureRequest) -> Iterator[list[Plan]]:
    """Every plan that is made in the test, by kvplan's functions or by an engine, in order.

    Add others to it, of fixtures of a wider scope, that the test's budget is to hold for.
    """
    with ExitStack() as stack:
        yield _observe(request.node, stack)


@pytest.fixture
def kvplan_golden(request: pytest.FixtureRequest) -> Iterator[GoldenPlans]:
    """Compare a plan with what it was: `kvplan_golden(plan)`, `kvplan_golden(plan, "prefill")`.

    With `plans/<test file>/<test>+<name>.json` beside the test file, which `--kvplan-update`
    writes.
    """
    from kvplan.testing import GoldenPlans

    path = request.node.path
    golden = GoldenPlans(
        path.parent / "plans" / path.stem,
        request.node.nodeid.partition("::")[2].replace("::", "."),
        request.config.getoption("--kvplan-update"),
        f"pytest --kvplan-update '{request.node.nodeid}'",
    )
    yield golden
    request.node.user_properties += [(WRITTEN, str(item)) for item in golden.written]
