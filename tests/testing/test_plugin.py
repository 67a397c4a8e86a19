"""The pytest plugin as users run it: exact texts of failures, and its cost for other tests."""

from __future__ import annotations

import re
from textwrap import dedent

from tests.testing.folder import Folder, errors

PLANS = """
    import kvplan
    from kvplan import CacheDesc, DataType, Plan, Rows, Transfer

    DESC = CacheDesc(4, (16, 4), DataType.DT_INT8)

    def plan(src, dst=(7, 8, 2)):
        return kvplan.plan(Transfer(Rows(DESC, src), Rows(DESC, dst)), local="dst")
"""


def test_tests_without_the_plugin_do_not_import_kvplan(folder: Folder) -> None:
    folder.write("def test_nothing(): assert [1] == [1]")
    folder.write(
        """
        import sys

        def pytest_unconfigure():
            found = {key.partition(".")[0] for key in sys.modules} & {"kvplan", "kvnative", "numpy"}
            print("imported:", sorted(found), "pytest_kvplan" in sys.modules)
        """,
        "conftest.py",
    )
    assert "imported: [] True" in folder.run_alone()


def test_an_assertion_that_fails_shows_the_difference(folder: Folder) -> None:
    folder.write(f"{dedent(PLANS)}\ndef test_it(): assert plan([4, 5, 9]) == plan([5, 4, 1])")
    text = "\n".join(errors(folder.run("-vv", code=1)))
    assert text == dedent(
        """\
        assert <Plan pull_blocks B2B L0-1 x 3 blocks: 8 desc, 48 B> == <Plan pull_blocks B2B L0-1 x 3 blocks: 12 desc, 48 B>
            verdict: different bytes - 48 destination bytes from another source
            desc     8 -> 12      bytes 48 B = 48 B
            tensor 0>0
          -   9>2           4
          +   1>2           4
          -   4-5>7-8       8
          +   5>7           4
          +   4>8           4
            (same change in 3 more tensors)"""  # noqa: E501
    )


def test_a_cut_message_begins_with_its_conclusion(folder: Folder) -> None:
    tables = "range(0, 16, 2), range(8)", "range(1, 16, 2), range(8)"
    folder.write(f"{dedent(PLANS)}\ndef test_it(): assert plan({tables[0]}) == plan({tables[1]})")
    cut = errors(folder.run(code=1))
    assert [item.strip() for item in cut[1:3]] == [
        "verdict: different bytes - 128 destination bytes from another source",
        "cause    every one of src_blocks is +1",
    ]
    assert "use '-vv' to show" in cut[-1]


def test_groups_are_compared_and_other_values_as_by_pytest(folder: Folder) -> None:
    folder.write(
        dedent(PLANS)
        + dedent(
            """
            def groups(*tables):
                named = {"a": plan([1, 2, 3]), "b": plan(*tables)}
                return Plan([it.part.labelled(name) for name, it in named.items()])

            def test_groups(): assert groups([4, 5, 9]) == groups([4, 5, 6])
            def test_kinds(): assert plan([4, 5, 9]) == groups([4, 5, 9])
            def test_not(): assert plan([4, 5, 9]) != plan([4, 5, 9])
            def test_others(): assert [1, 2] == [1, 3]
            """
        )
    )
    output = folder.run("-vv", code=1)
    said = [error.strip() for error in errors(output)]
    assert "verdict: part b: different bytes - 16 destination bytes from another source" in said
    assert "part a: identical" in said
    assert "At index 1 diff: 2 != 3" in output
    assert "verdict: part (unnamed) only in the old plan; parts a, b only in the new plan" in said
    section = output.partition("_ test_not _")[2].partition("\n____")[0]
    assert "!= <Plan" in section
    assert "verdict" not in section


def test_assert_equivalent_points_at_the_line_of_the_test(folder: Folder) -> None:
    folder.write(
        f"{dedent(PLANS)}\ndef test_it():\n    plan([4, 5, 9]).assert_equivalent(plan([4, 5, 1]))"
    )
    output = folder.run(code=1)
    assert ">       plan([4, 5, 9]).assert_equivalent(plan([4, 5, 1]))" in output
    assert "raise AssertionError" not in output
    assert "    cause    src_blocks[2] is 1, and was 9" in "\n".join(errors(output))


BUDGET = """
    import pytest
    import kvplan
    from kvplan import Rows, Transfer

    def pull(desc, src, dst):
        return kvplan.plan(Transfer(Rows(desc, src), Rows(desc, dst)), local="dst")

    @pytest.mark.kvplan(max_descriptors=10)
    def test_merged(kvplan_desc):
        pull(kvplan_desc(), range(12), range(20, 32))

    @pytest.mark.kvplan(max_descriptors=10)
    def test_alone(kvplan_desc):
        pull(kvplan_desc(), [1], [2])
        pull(kvplan_desc(), [0, 2, 4], [3, 2, 1])

    @pytest.fixture
    def made_before(kvplan_desc):
        return pull(kvplan_desc(), range(4), [9, 7, 5, 3])

    @pytest.mark.kvplan(max_nbytes=1000)
    def test_of_a_fixture(made_before): pass

    @pytest.mark.kvplan(max_descriptors=10)
    def test_without_a_plan(): pass

    @pytest.mark.kvplan(max_descriptors=10)
    def test_that_fails_by_itself(made_before):
        raise RuntimeError("by itself")

    @pytest.mark.kvplan(max_descriptors=10)
    def test_handed_in(kvplan_plans, made_once):
        kvplan_plans.append(made_once)

    @pytest.fixture(scope="module")
    def made_once():
        from kvplan.testing import make_desc, observe_plans
        with observe_plans() as plans:
            pull(make_desc(), range(4), [9, 7, 5, 3])
        return plans[0]

    @pytest.mark.kvplan(most=10)
    def test_misspelled(): pass

    @pytest.mark.kvplan(10)
    def test_positional(): pass

    @pytest.mark.kvplan(max_nbytes=-1)
    def test_negative(): pass

    def test_no_budget(kvplan_plans, made_before):
        assert kvplan_plans == [made_before]
        from kvplan.planning.plan import OBSERVERS
        assert len(OBSERVERS) == 1

    def test_nothing_is_left():
        from kvplan.planning.plan import OBSERVERS
        assert OBSERVERS == []
"""


def test_plans_over_budget_are_explained(folder: Folder) -> None:
    folder.write(BUDGET)
    output = folder.run(code=1)
    assert "kvplan: 1 of 2 plans over budget: 12 descriptors, max_descriptors=10\n" in output
    assert "  12 slices -> 12 descriptors (0 merged) | 384 KiB\n" in output
    assert "kvplan: 1 of 1 plan over budget: 524,288 bytes, max_nbytes=1,000\n" in output
    assert "kvplan: no plan was made, so nothing was checked against the budget" in output
    assert "RuntimeError: by itself" in output
    assert len(re.findall("^kvplan: .* over budget", output, re.MULTILINE)) == 3
    assert "@pytest.mark.kvplan: Budget.__init__() got an unexpected keyword argument" in output
    assert "@pytest.mark.kvplan: name the arguments (10,)" in output
    assert "@pytest.mark.kvplan: max_nbytes=-1 must be None or >= 0" in output
    assert "5 failed, 3 passed, 3 errors" in output


def test_plans_that_engines_make_are_in_the_budget(folder: Folder) -> None:
    folder.write(
        """
        import pytest
        from kvplan import BlocksCacheKey, ClusterInfo, LlmDataDist, LlmRole, Rows, Transfer

        @pytest.mark.kvplan(max_descriptors=3)
        def test_it(kvplan_desc, kvplan_plans):
            desc = kvplan_desc(blocks=16, dim=8)
            roles = LlmRole.PROMPT, LlmRole.DECODER
            with LlmDataDist(1, roles[0]) as prefill, LlmDataDist(2, roles[1]) as decode:
                prefill.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
                decode.initialize()
                prefill.allocate_blocks_cache(desc, BlocksCacheKey(1))
                mine = decode.allocate_blocks_cache(desc)
                decode.link_clusters([ClusterInfo(1, prefill.listen_address)]).raise_for_status()
                decode.pull_blocks(BlocksCacheKey(1), mine, [1, 2], [3, 4])
                decode.run({"one": Transfer(Rows(BlocksCacheKey(1), [1]), Rows(mine, [3]))})
            print([repr(plan) for plan in kvplan_plans])
        """
    )
    output = folder.run(code=1)
    assert "2 of 2 plans over budget: 4 descriptors, max_descriptors=3" in output
    assert "pull_blocks  B2B   cache 1 of cluster 1 -> cache 1" in output
    assert "'<Plan pull_groups B2B one: 4 desc," in output


def test_block_tables_are_reproducible_and_printed_on_failure(folder: Folder) -> None:
    folder.write(
        """
        def test_it(kvplan_desc, kvplan_block_tables):
            one = kvplan_block_tables(64, 5)
            src, dst = kvplan_block_tables(kvplan_desc(blocks=32), 4, 6, reserved=[0])
            assert not set(src) & set(dst)
            assert one == 0

        def test_that_passes(kvplan_block_tables):
            assert kvplan_block_tables(10, 3)
        """
    )
    once, again = (folder.run(code=1) for _ in range(2))
    printed = re.compile(r"-+ kvplan_block_tables -+\n--kvplan-seed=(\d+)\n(64 blocks.*\n32 .*)\n")
    assert len(printed.findall(once)) == 1
    assert printed.findall(once) == printed.findall(again)
    ((seed, other),) = printed.findall(folder.run("--kvplan-seed=7", code=1))
    assert seed == "7"
    assert other != printed.findall(once)[0][1]


REFUSED = """
    import kvplan
    from kvplan import Rows, Transfer

    def test_rows(kvplan_desc):
        desc = kvplan_desc(blocks=8)
        kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [99])), local="dst")

    def test_type(kvplan_desc):
        kvplan.plan(Transfer(Rows(kvplan_desc(), ["x"]), Rows(kvplan_desc(), [9])), local="dst")

    def test_layout(kvplan_desc):
        kvplan_desc("nonsense")

    def test_tables(kvplan_block_tables):
        kvplan_block_tables(4, 9)

    def test_reference(kvplan_reference, kvplan_desc):
        desc = kvplan_desc(blocks=8)
        plan = kvplan.plan(Transfer(Rows(desc, [1]), Rows(desc, [3])), local="dst")
        kvplan_reference(plan, src=[1])
"""


def test_a_refusal_is_shown_at_the_line_of_the_test(folder: Folder) -> None:
    folder.write(REFUSED)
    said = folder.run(code=1)
    assert "E       kvplan.status.LLMException: dst.blocks[0]=99 is out of range [0, 8)" in said
    assert "E       TypeError: src.blocks must hold integers, not <U1" in said
    assert {*re.findall(r"^(\S+\.py):\d+: ", said, re.MULTILINE)} == {"test_it.py"}
    assert "kvplan/planning/planner.py" in folder.run("--full-trace", code=1)


def test_an_error_that_kvplan_did_not_raise_itself_keeps_its_frames(folder: Folder) -> None:
    folder.write(
        """
        from kvplan.testing import make_desc

        class Broken(str):
            def split(self):
                return 1 // 0

        def test_it():
            make_desc(Broken("a"))
        """
    )
    said = folder.run(code=1)
    assert "ZeroDivisionError" in said
    assert "kvplan/testing/caches.py" in said


def test_the_reference_is_executed_on_filled_arrays(folder: Folder) -> None:
    folder.write(
        """
        import kvplan
        from kvplan import Rows, Transfer

        def test_it(kvplan_desc, kvplan_reference):
            desc = kvplan_desc()
            transfer = Transfer(Rows(desc, [4, 5]), Rows(desc, [7, 8]))
            moved = kvplan_reference(kvplan.plan(transfer, local="dst"))
            assert (moved.dst[3][7] == moved.src[3][4]).all()
            assert not moved.dst[3][4].any()
        """
    )
    folder.run()
