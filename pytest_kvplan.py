"""The pytest plugin of kvplan: differences of plans, fixtures, budgets and golden plans.

pytest loads the plugin if kvplan is installed (`-p no:kvplan` disables it). The plugin imports
neither kvplan nor NumPy until a test uses it, so that other tests do not pay for it.
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
"""The property of a test's report that names a written file; xdist's workers send it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line."""
    group = parser.getgroup("kvplan", "kvplan: plans of KV cache transfers")
    group.addoption(
        "--kvplan-update",
        action="store_true",
        help="write golden plans that differ or are missing, instead of failing",
    )
    group.addoption(
        "--kvplan-seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the random block tables in every test (default: 0)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers",
        "kvplan(max_descriptors=None, max_nbytes=None): fail if a plan that is made in the test, "
        "by kvplan's functions or by an engine, is over this budget, or if none is made",
    )


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Show the difference between two plans that a test asserts to be equal."""
    # Without an import of kvplan, neither is a plan.
    if op != "==" or "kvplan.planning.plan" not in sys.modules:
        return None
    from kvplan.testing import difference

    lines = difference(left, right).splitlines()
    if not lines:
        return None
    # pytest truncates long output, so the verdict comes first; -vv shows all.
    first = [line for line in lines if line.startswith(("  verdict:", "verdict:", "  cause "))]
    return [f"{left!r} == {right!r}", *first[::-1], *(line for line in lines if line not in first)]


# Plain hooks, not wrappers: wrappers need pytest 8, and would break older versions.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin to observe plans if the test has a budget."""
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
    """End observing."""
    if _budgets in item.stash:
        item.stash[_budgets][1].close()
        del item.stash[_budgets]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    """Show the test's line that kvplan refused, and the test's block tables."""
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
    """Return kvplan's modules in a traceback, if the exception was raised by kvplan.

    Any other exception may be a bug of kvplan, and keeps its frames.
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

    A test gets the same tables in each run, and prints them if it fails. `--kvplan-seed=N` makes
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

    Elements at src are random and never 0; elements at dst that were not written are 0.
    Arguments as for `kvplan.testing.run_reference`.
    """
    from kvplan.testing import run_reference

    return run_reference


@pytest.fixture
def kvplan_tokens() -> Callable[..., NDArray[Any]]:
    """Return a request's content in a cache, by token: `kvplan_tokens(desc, moved.dst, blocks)`.

    Arguments as for `kvplan.testing.request_tokens`.
    """
    from kvplan.testing import request_tokens

    return request_tokens


@pytest.fixture
def kvplan_plans(request: pytest.FixtureRequest) -> Iterator[list[Plan]]:
    """All plans that are made in the test, by kvplan's functions or by an engine, in order.

    Append plans of fixtures with a wider scope if the test's budget should include them.
    """
    with ExitStack() as stack:
        yield _observe(request.node, stack)


@pytest.fixture
def kvplan_golden(request: pytest.FixtureRequest) -> Iterator[GoldenPlans]:
    """Compare a plan with a golden plan: `kvplan_golden(plan)`, `kvplan_golden(plan, "prefill")`.

    Golden plans are `plans/<test file>/<test>+<name>.json` beside the test file;
    `--kvplan-update` writes them.
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
