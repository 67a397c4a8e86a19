"""The compiler compares include/kvnative/ucx.h with the headers of UCX."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvplan.transport.ucx.library import Found
from tests.support.peer import ROOT

HEADER = ROOT / "include/kvnative/ucx.h"

# Our types and UCX's. UCX has appended fields to the first one since API 1.13.
GROWN = {
    "kvn_ucp_params": "ucp_params_t",
    "kvn_ucp_worker_params": "ucp_worker_params_t",
    "kvn_ucp_ep_params": "ucp_ep_params_t",
    "kvn_ucp_ep_attr": "ucp_ep_attr_t",
    "kvn_ucp_mem_map_params": "ucp_mem_map_params_t",
    "kvn_ucp_request_param": "ucp_request_param_t",
}
SAME = {
    "kvn_ucp_transports": "ucp_transports_t",
    "kvn_ucp_transport_entry": "ucp_transport_entry_t",
    "kvn_ucs_sock_addr": "ucs_sock_addr_t",
    "kvn_ucp_err_handler": "ucp_err_handler_t",
    "kvn_ucs_status": "ucs_status_t",
}
FIELDS = {"kvn_ucp_request_param.send": "cb.send"}  # a union there

# Our prefixes and UCX's.
VALUES = {
    "KVN_UCP_WORKER_PARAM_": "UCP_WORKER_PARAM_FIELD_",
    "KVN_UCP_EP_PARAM_": "UCP_EP_PARAM_FIELD_",
    "KVN_UCP_EP_ATTR_": "UCP_EP_ATTR_FIELD_",
    "KVN_UCP_MEM_MAP_PARAM_": "UCP_MEM_MAP_PARAM_FIELD_",
    "KVN_UCP_PARAM_": "UCP_PARAM_FIELD_",
    "KVN_UCP_OP_ATTR_": "UCP_OP_ATTR_FIELD_",
    "KVN_UCS_LOG_LEVEL_": "UCS_LOG_LEVEL_",
    "KVN_UCS_LOG_": "UCS_LOG_FUNC_RC_",
    "KVN_UCS_MEMORY_": "UCS_MEMORY_TYPE_",
}
SPECIAL = {"KVN_UCP_OP_ATTR_MULTI_SEND": "UCP_OP_ATTR_FLAG_MULTI_SEND"}


def theirs(name: str) -> str:
    if name in SPECIAL:
        return SPECIAL[name]
    for ours, other in VALUES.items():
        if name.startswith(ours):
            return name.replace(ours, other)
    return name.removeprefix("KVN_")


def comparisons(text: str) -> list[str]:
    """Return a static assertion for each value, field and size that the header declares."""
    found = []
    for body in re.findall(r"^enum \{(.*?)\};", text, re.DOTALL | re.MULTILINE):
        found += [
            f'_Static_assert((long){name} == (long){theirs(name)}, "{name}");'
            for name in re.findall(r"\b(KVN_UC[PS]_\w+) =", body)
        ]
    for ours, other in GROWN.items():
        body = re.search(rf"typedef struct {ours} \{{(.*?)^\}}", text, re.DOTALL | re.MULTILINE)
        assert body, ours
        for line in body[1].strip().splitlines():
            field = re.findall(r"(\w+)(?:\[\d+\])?(?:\)\(.*\))?;", line)[0]
            place = FIELDS.get(f"{ours}.{field}", field)
            found.append(
                f"_Static_assert(offsetof({ours}, {field}) == offsetof({other}, {place}) && "
                f"sizeof((({ours} *)0)->{field}) == sizeof((({other} *)0)->{place}), "
                f'"{ours}.{field}");'
            )
    for ours, other in SAME.items():
        found.append(f'_Static_assert(sizeof({ours}) == sizeof({other}), "{ours}");')
    return found


def calls(text: str) -> list[str]:
    """Return assertions that each function has as many parameters, and the same result."""
    found = []
    for name, parameters in re.findall(r"X\([\w ]+\*?, (uc[ps]_\w+),\s*\(([^()]*)\)\)", text):
        zeros = ", ".join("0" for _ in parameters.split(","))  # a number, or a null pointer
        found.append(
            f"_Static_assert(sizeof({name}({zeros})) == sizeof(((kvn_ucx *)0)->{name}({zeros})),"
            f' "{name}");'
        )
    return found


def test_our_declarations_agree_with_the_headers(ucx: Found, tmp_path: Path) -> None:
    folders = [parent / "include" for parent in Path(ucx.path).resolve().parents[1:3]]
    include = next((folder for folder in folders if (folder / "ucp/api/ucp.h").exists()), None)
    if not include:
        pytest.skip(f"{ucx.path} came without its headers")
    text = re.sub(r"\\\n", " ", HEADER.read_text("utf-8"))
    lines = comparisons(text) + calls(text)
    assert len(lines) > 100  # the patterns above have found the declarations
    source = tmp_path / "abi.c"
    source.write_text(
        "\n".join(
            [
                "#include <ucp/api/ucp.h>",
                "#include <ucs/debug/log_def.h>",
                '#include "kvnative/ucx.h"',
                *lines,
            ]
        )
    )
    done = subprocess.run(
        ["gcc", "-std=gnu11", "-fsyntax-only", f"-I{include}", f"-I{ROOT / 'include'}", source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
