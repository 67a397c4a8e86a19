"""Golden plans of the pytest plugin: their names and texts, and when they are written."""

from __future__ import annotations

from tests.testing.folder import Folder, errors

GOLDEN = """
    import kvplan
    from kvplan import Plan, Rows, Transfer

    TABLE = [4, 5, 9]

    def test_it(kvplan_desc, kvplan_golden):
        desc = kvplan_desc()
        plan = kvplan.plan(Transfer(Rows(desc, TABLE), Rows(desc, [7, 8, 2])), local="dst")
        kvplan_golden(plan)
        parts = [plan.part.labelled(name) for name in "ba"]
        kvplan_golden(Plan(parts), "as parts")
"""


def test_a_golden_plan_is_written_compared_and_written_again(folder: Folder) -> None:
    test = folder.write(GOLDEN)
    missing = folder.run(code=1)
    path = folder.path / "plans" / "test_it" / "test_it.json"
    assert (
        f"AssertionError: golden plan {path} does not exist; the plan of the test is\n" in missing
    )
    assert "|-- tensor 0 -> 0 K   4-5 -> 7-8  64 KiB   merged 2  tokens 0..31" in missing
    how = "If it is as it should be: pytest --kvplan-update 'test_it.py::test_it'"
    assert how in missing
    assert not path.exists()

    assert folder.run("--kvplan-update").splitlines()[-3:-1] == [
        f"kvplan: wrote {path}",
        f"kvplan: wrote {path.parent / 'test_it+as-parts-1ce332d5.json'}",
    ]
    assert "wrote" not in folder.run()
    assert "wrote" not in folder.run("--kvplan-update")  # the plan is equal

    test.write_text(test.read_text().replace("TABLE = [4, 5, 9]", "TABLE = [4, 5, 10]"))
    differs = folder.run(code=1)
    assert f"AssertionError: the plan differs from {path}\n" in differs
    assert "    cause    src_blocks[2] is 10, and was 9" in "\n".join(errors(differs))
    assert how in differs
    assert "wrote" in folder.run("--kvplan-update")
    folder.run()

    path.write_text("{}")
    assert f"{path}: document is not a plan: schema_version=None" in folder.run(code=1)
    path.write_text("{")
    assert f"{path} is not a plan: it is not JSON: Expecting" in folder.run(code=1)


def test_names_of_golden_files(folder: Folder) -> None:
    folder.write(
        """
        import pytest
        import kvplan
        from kvplan import Rows, Transfer

        class TestClass:
            @pytest.mark.parametrize("layout", ["NHD", "block head token dim"])
            def test_it(self, layout, kvplan_desc, kvplan_golden):
                desc = kvplan_desc(layout)
                transfer = Transfer(Rows(desc, [1]), Rows(desc, [2]))
                kvplan_golden(kvplan.plan(transfer, local="dst"), "a-b")

        def test_twice(kvplan_desc, kvplan_golden):
            desc = kvplan_desc()
            one, other = (
                kvplan.plan(Transfer(Rows(desc, [block]), Rows(desc, [2])), local="dst")
                for block in (1, 3)
            )
            kvplan_golden(one)
            kvplan_golden(one)
            with pytest.raises(ValueError, match="already belongs to another plan"):
                kvplan_golden(other)
            with pytest.raises(TypeError, match="plan='no' must be Plan"):
                kvplan_golden("no")
        """,
        "sub/test_names.py",
    )
    folder.run("--kvplan-update")
    files = sorted(path.name for path in (folder.path / "sub/plans/test_names").iterdir())
    assert files == [
        "TestClass.test_it-NHD+a-b.json",
        "TestClass.test_it-block-head-token-dim+a-b-94f19a7c.json",
        "test_twice.json",
    ]
    folder.run()


def test_similar_parameters_have_different_golden_files(folder: Folder) -> None:
    folder.write(
        """
        import pytest
        import kvplan
        from kvplan import Rows, Transfer

        GIVEN = [1, -1, (1, 1), (1, -1), "<1>", "[1]", "x" * 300, "x" * 301, "\u00fc" * 150]

        @pytest.mark.parametrize("it", GIVEN, ids=str)
        def test_it(it, kvplan_desc, kvplan_golden):
            desc = kvplan_desc(blocks=64)
            transfer = Transfer(Rows(desc, [GIVEN.index(it)]), Rows(desc, [2]))
            kvplan_golden(kvplan.plan(transfer, local="dst"))
        """
    )
    folder.run("--kvplan-update")
    folder.run()
    files = {path.name for path in (folder.path / "plans/test_it").iterdir()}
    assert len(files) == 9
    assert {"test_it-1.json", "test_it--1.json"} < files


def test_the_text_of_a_golden_plan(folder: Folder) -> None:
    folder.write(
        """
        import kvplan
        from kvplan import CacheDesc, DataType, Rows, Transfer

        DESC = CacheDesc(2, (64, 4), DataType.DT_INT8)

        def test_it(kvplan_golden):
            transfer = Transfer(Rows(DESC, range(0, 24, 2)), Rows(DESC, range(12)))
            kvplan_golden(kvplan.plan(transfer, local="dst"))
        """
    )
    folder.run("--kvplan-update")
    text = (folder.path / "plans/test_it/test_it.json").read_text()
    assert text == GOLDEN_TEXT
    (folder.path / "plans/test_it/test_it.json").unlink()
    assert "kvplan: wrote" in folder.run_alone("--kvplan-update", "-n", "1", PYTHONHASHSEED="2")
    assert (folder.path / "plans/test_it/test_it.json").read_text() == text


GOLDEN_TEXT = """\
{
  "parts": [
    {
      "coalesce": "sorted",
      "dst": {
        "count": 64,
        "data_type": "DT_INT8",
        "label": null,
        "layout": null,
        "name": "",
        "num_tensors": 2,
        "paged": true,
        "placement": "DEVICE",
        "shape": [64, 4],
        "shard": null,
        "stride": 4
      },
      "dst_tensors": [0, 2],
      "kind": "B2B",
      "name": "",
      "num_slices": 12,
      "operation": "pull_blocks",
      "reinterpret": false,
      "segments": {
        "dst_offsets": [
          0, 4, 8, 12, 16, 20, 24, 28, 32, 36,
          40, 44
        ],
        "nbytes": [
          4, 4, 4, 4, 4, 4, 4, 4, 4, 4,
          4, 4
        ],
        "repeats": [],
        "src_offsets": [
          0, 8, 16, 24, 32, 40, 48, 56, 64, 72,
          80, 88
        ]
      },
      "source": null,
      "split": [],
      "src": {
        "count": 64,
        "data_type": "DT_INT8",
        "label": null,
        "layout": null,
        "name": "",
        "num_tensors": 2,
        "paged": true,
        "placement": "DEVICE",
        "shape": [64, 4],
        "shard": null,
        "stride": 4
      },
      "src_tensors": [0, 2],
      "tables": {
        "dst": [
          0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
          10, 11
        ],
        "dst_token": 0,
        "num_tokens": null,
        "src": [
          0, 2, 4, 6, 8, 10, 12, 14, 16, 18,
          20, 22
        ],
        "src_token": 0
      },
      "tensors_per_layer": 2
    }
  ],
  "schema_version": 3
}
"""
