"""`kvplan replay`, on dumps that a user has made of two caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import Cache, CacheDesc, DataType, Rows, Transfer, reference
from tests.cli.test_command import command
from tests.recording.operations import record, recorder

DESC = CacheDesc(4, (32, 16, 4, 8), DataType.DT_FLOAT16, kv_tensor_format="NHD")
TRANSFER = Transfer(Rows(DESC, [3, 4, 9, 12]), Rows(DESC, [7, 8, 2, 20]))


@pytest.fixture
def dumps(tmp_path: Path) -> dict[str, Any]:
    """A plan, the content of its source, and that of its destination, with one wrong block."""
    random = np.random.default_rng(0)
    src = [random.standard_normal(DESC.shape).astype(np.float16) for _ in range(4)]
    dst = [np.zeros(DESC.shape, np.float16) for _ in range(4)]
    plan = kvplan.plan(TRANSFER, local="dst")
    reference.execute(plan, src, dst)
    plan.save(tmp_path / "plan.json")
    np.savez(tmp_path / "src.npz", *src)
    np.savez(tmp_path / "right.npz", *dst)
    dst[2][2] = src[2][30]
    np.savez(tmp_path / "dst.npz", *dst)
    return {path.name: str(path) for path in tmp_path.iterdir()}


def test_wrong_bytes_are_printed_and_set_the_exit_code(dumps: dict[str, Any]) -> None:
    found = command("replay", dumps["plan.json"], dumps["src.npz"], dumps["dst.npz"])
    assert (found.returncode, found.stderr) == (1, "")
    assert "layer 1, K, heads 0..3, tokens 32..47, block 2 at dst" in found.stdout
    assert "it holds what lies in block 30 at the source, not of this request" in found.stdout
    right = command("replay", dumps["plan.json"], dumps["src.npz"], dumps["right.npz"])
    assert (right.returncode, right.stdout[:12]) == (0, "as expected:")
    given = ("--expected", dumps["right.npz"])
    by_other = command("replay", *given, dumps["plan.json"], dumps["src.npz"], dumps["dst.npz"])
    assert by_other.returncode == 1


@pytest.mark.parametrize(("atol", "code"), [("0.5", 0), ("0.25", 1)])
def test_a_tolerance_permits_small_differences(
    dumps: dict[str, Any], tmp_path: Path, atol: str, code: int
) -> None:
    with np.load(dumps["right.npz"]) as right:
        whole = [value.round() for value in right.values()]
    np.savez(tmp_path / "whole.npz", *whole)
    np.savez(tmp_path / "near.npz", *(item + np.float16(0.5) for item in whole))
    given = ("--expected", str(tmp_path / "whole.npz"), "--atol", atol)
    found = command(
        "replay", *given, dumps["plan.json"], dumps["src.npz"], str(tmp_path / "near.npz")
    )
    assert (found.returncode, found.stderr) == (code, "")


def test_a_recording_names_the_writer_of_the_wrong_block(
    dumps: dict[str, Any], tmp_path: Path
) -> None:
    with recorder(tmp_path / "a.kvrec") as writer:
        for cache, tag in ((1, "mine"), (2, "of another cache")):
            transfer = Transfer(TRANSFER.src, Rows(Cache(DESC, cache), TRANSFER.dst.blocks))
            record(writer, kvplan.plan(transfer, local="dst"), tag)
    given = ("--recording", str(tmp_path / "a.kvrec"), "--cache", "1", "--json")
    found = command("replay", *given, dumps["plan.json"], dumps["src.npz"], dumps["dst.npz"])
    (difference,) = json.loads(found.stdout)["differences"]
    (write,) = difference["first"]["writes"]
    assert "mine" in write
    given = ("--recording", str(tmp_path / "a.kvrec"), "--cache", "-1")
    found = command("replay", *given, dumps["plan.json"], dumps["src.npz"], dumps["dst.npz"])
    assert found.returncode == 2
    assert "'--cache': -1 is not in the range" in found.stderr


def test_a_name_in_a_plan_does_not_command_the_terminal(dumps: dict[str, Any]) -> None:
    path = Path(dumps["plan.json"])
    evil = json.loads(path.read_text())
    evil["parts"][0]["dst"]["name"] = "\x1b]0;mine\x07"
    path.write_text(json.dumps(evil))
    found = command("replay", dumps["plan.json"], dumps["src.npz"], dumps["dst.npz"])
    assert "block 2 of ?]0;mine?\n" in found.stdout


def test_json(dumps: dict[str, Any]) -> None:
    found = command("replay", "--json", dumps["plan.json"], dumps["src.npz"], dumps["dst.npz"])
    assert found.returncode == 1
    (difference,) = json.loads(found.stdout)["differences"]
    assert (difference["layers"], difference["tokens"]) == ([1], [[32, 47]])
    assert (difference["first"]["row"], difference["first"]["as_planned"]) == (2, False)


def test_a_file_that_is_not_a_dump_is_refused_in_one_line(
    dumps: dict[str, Any], tmp_path: Path
) -> None:
    alone, junk, noise, few, bent = (
        str(tmp_path / name)
        for name in ("alone.npy", "junk.npz", "noise.npz", "few.npz", "bent.npz")
    )
    np.save(alone, np.zeros(3))
    Path(junk).write_bytes(b"PK\x03\x04junk")
    Path(noise).write_bytes(b"\xc5a\xff noise")
    np.savez(few, np.zeros(3))
    np.savez_compressed(bent, np.arange(1000))
    whole = bytearray(Path(bent).read_bytes())
    whole[60:80] = b"\xff" * 20  # in the compressed bytes
    Path(bent).write_bytes(whole)
    for dst, message in (
        (alone, "has one array"),
        (junk, "is not a file of np.savez"),
        (noise, "noise.npz is not a file of np.savez"),
        (bent, "bent.npz is not a file of np.savez, or is damaged"),
        (few, "dst has 1 tensor; the plan needs 4"),
        (str(tmp_path), "is a directory"),
        (str(tmp_path / "missing"), "does not exist"),
    ):
        refused = command("replay", dumps["plan.json"], dumps["src.npz"], dst)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert "pickle" not in refused.stderr  # NumPy advises to load such files unsafely
        assert "Traceback" not in refused.stderr
    misused = command(
        "replay", "--atol", "1", dumps["plan.json"], dumps["src.npz"], dumps["dst.npz"]
    )
    assert (misused.returncode, "--atol needs --expected" in misused.stderr) == (2, True)


def test_dumps_whose_zip_headers_are_damaged_are_refused(tmp_path: Path, dumps) -> None:
    """The archive's directory names a way to compress, to encrypt, and a place of the array."""
    plain = tmp_path / "plain.npz"
    np.savez(plain, np.zeros(3))
    whole = plain.read_bytes()
    entry = whole.index(b"PK\1\2")  # of the directory
    for at, value in ((8, 1), (10, 99), (45, 255)):
        damaged = bytearray(whole)
        damaged[entry + at] = value
        plain.write_bytes(damaged)
        refused = command("replay", dumps["plan.json"], dumps["src.npz"], str(plain))
        assert refused.returncode == 2
        assert "plain.npz is not a file of np.savez, or is damaged" in refused.stderr
        assert "Traceback" not in refused.stderr
