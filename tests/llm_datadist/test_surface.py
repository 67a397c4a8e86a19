"""The surface of the official package, compared by introspection with surface.txt.

A line of surface.txt is a class with its constructor, a method, a property, or a member of an enum;
annotations are left out.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum, IntEnum
from importlib import import_module
from pathlib import Path

import pytest

import kvplan.llm_datadist as package
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from kvplan.llm_datadist.v2.llm_types import PushType

ROOMS = "kvplan."
ROOT = Path(__file__).parents[2]
NAMES = """
    LLMClusterInfo LLMStatusCode LLMException LLMRole LlmConfig LLMConfig DataType Status CacheDesc
    CacheKey CacheKeyByIdAndIndex KvCache Cache BlocksCacheKey LLMDataDist Placement
    RegisterMemStatus LayerSynchronizer TransferConfig CacheTask TransferWithCacheKeyConfig Memtype
    MemInfo
"""

MODULES = {
    "configs": "LLMClusterInfo LLMRole LlmConfig trans_str_ip",
    "status": "LLMException LLMStatusCode Status code_2_status handle_llm_status raise_if_false "
    "raise_if_true",
    "data_type": "DataType dtype_to_np_dtype np_dtype_to_dtype valid_np_dtypes",
    "utils.log": "_find_caller error get_logger info warn",
    "utils.utils": "check_dict check_inner check_int32 check_int64 check_isinstance "
    "check_list_int32 check_list_int64 check_list_uint64 check_positive_or_set_default "
    "check_uint16 check_uint32 check_uint64 check_uint8",
    "v2.llm_types": "BlocksCacheKey Cache CacheDesc CacheKey CacheKeyByIdAndIndex CacheTask "
    "KvCache LayerSynchronizer MemInfo Memtype Placement PushType RegisterMemStatus TransferConfig "
    "TransferWithCacheKeyConfig check_layer_range int_to_mem_status_dict",
    "v2.llm_datadist": "LLMDataDist",
    "v2.cache_manager": "CacheManager",
    "v2.llm_utils": "calc_tensor_size clone_cache_desc is_invalid_id is_valid_id "
    "layer_range_to_tensor_indices parse_listen_ip_info",
    "v2.config": "EngineConfig",
}

# kvplan's error never has the status of a success, and has more attributes.
OURS = {
    "class LLMException(self, *args, status_code=LLMStatusCode.LLM_SUCCESS)": "class LLMException"
    "(self, *args, status_code=LLMStatusCode.LLM_FAILED, origin=None, unconfirmed=())",
}
OUR_MEMBERS = {"LLMStatusCode": ["    LLM_CANCELLED = -2"]}


def classes_of_file() -> dict[str, list[str]]:
    """Return the lines of each class of surface.txt, by the name of the class."""
    found: dict[str, list[str]] = {}
    for block in (Path(__file__).with_name("surface.txt")).read_text().strip().split("\n\n"):
        head, *members = block.splitlines()
        name = head.split()[1].partition("(")[0]
        found[name] = [OURS.get(head, head), *members, *OUR_MEMBERS.get(name, ())]
    return found


WRITTEN = classes_of_file()


def class_called(name: str) -> type:
    found = {"CacheManager": CacheManager, "PushType": PushType}.get(name)
    return found if found is not None else getattr(package, name)  # type: ignore[no-any-return]


class Default:
    """A default, with the text of surface.txt as its repr."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return str(self.value) if isinstance(self.value, Enum) else repr(self.value)


def arguments(call: Callable[..., object]) -> str:
    """Return names, kinds and defaults of the parameters, as text."""
    signature, empty = inspect.signature(call), inspect.Parameter.empty
    bare = [
        each.replace(
            annotation=empty, default=empty if each.default is empty else Default(each.default)
        )
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=empty))


def constructor(found: type) -> str:
    return arguments(found.__init__)  # type: ignore[misc]


def members(found: type) -> Iterator[str]:
    """Return the public members, also of base classes other than Python's own."""
    bases = [base for base in reversed(found.__mro__) if base.__module__.startswith(ROOMS)]
    for name, member in {name: each for base in bases for name, each in vars(base).items()}.items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"    {'settable ' if member.fset else ''}property {name}"
        elif isinstance(member, staticmethod | classmethod):
            yield f"    {type(member).__name__} {name}{arguments(member.__func__)}"
        elif inspect.isfunction(member):
            yield f"    {name}{arguments(member)}"
        else:
            yield f"    attribute {name}"


def enum_lines(found: type[Enum]) -> list[str]:
    base = "IntEnum" if issubclass(found, IntEnum) else "Enum"
    return [
        f"enum {found.__name__}({base})",
        *(f"    {name} = {member.value}" for name, member in found.__members__.items()),
    ]


@pytest.mark.parametrize("name", [n for n, lines in WRITTEN.items() if lines[0][:5] == "class"])
def test_a_class_has_the_official_constructor_methods_and_properties(name: str) -> None:
    found = class_called(name)
    assert f"class {found.__name__}{constructor(found)}" == WRITTEN[name][0]
    assert sorted(members(found), key=str.split) == sorted(WRITTEN[name][1:], key=str.split)


@pytest.mark.parametrize("name", [n for n, lines in WRITTEN.items() if lines[0][:4] == "enum"])
def test_an_enum_has_the_official_members(name: str) -> None:
    head, *lines = enum_lines(class_called(name))
    assert [head, *sorted(lines)] == [WRITTEN[name][0], *sorted(WRITTEN[name][1:])]


def test_the_file_has_the_official_numbers_of_classes_and_members() -> None:
    lines = [line for lines in WRITTEN.values() for line in lines]
    assert sum(line.startswith("class") for line in lines) == 17
    assert sum(line.startswith("    ") and "(" in line for line in lines) == 39
    assert sum("property" in line for line in lines) == 69
    assert sum("settable" in line for line in lines) == 31
    assert sum(" = " in line for line in lines) == 56 + 1  # LLM_CANCELLED of kvplan


def test_the_package_exports_the_official_names() -> None:
    assert sorted(package.__all__) == sorted(package.v2_list) == sorted(NAMES.split())
    assert len(package.__all__) == 23
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert package.LLMConfig is package.LlmConfig


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_the_names_that_clients_import(module: str) -> None:
    found = import_module(f"kvplan.llm_datadist.{module}")
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("name", ["LLMRole", "Placement", "LLMStatusCode"])
def test_an_int_enum_prints_its_name(name: str) -> None:
    member = next(iter(class_called(name)))  # type: ignore[call-overload]
    assert str(member) == f"{name}.{member.name}"


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_importing_sets_the_variable_that_the_official_package_sets(
    before: str | None, after: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "AUTO_USE_UC_MEMORY"}
    environment |= {"PYTHONPATH": str(ROOT)}
    if before is not None:
        environment["AUTO_USE_UC_MEMORY"] = before
    code = "import kvplan.llm_datadist, os; print(os.environ['AUTO_USE_UC_MEMORY'])"
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == after


def test_each_property_has_the_type_of_its_value() -> None:
    """Editors and `help` show these types."""
    properties = vars(package.LLMClusterInfo)
    for name, kind in (("remote_cluster_id", int), ("local_ip_info_list", list[tuple[int, int]])):
        assert inspect.signature(properties[name].fget).return_annotation == kind
