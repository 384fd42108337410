import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
tool = pytest.importorskip("analysis.tools.compile_kernels")


def run(*arguments, interpret=False):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "analysis.tools.compile_kernels", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_no_default_configuration_spills_on_sm_90(tmp_path):
    path = tmp_path / "kernels.json"
    # The most used size and type, to take seconds; the script on its own compiles all of them.
    done = run("--targets", "sm_90", "--only", "d128 bf16", "--json", str(path))
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert {"triton", "torch", "commit"} <= found["environment"].keys()
    kernels = {one["kernel"]: one for one in found["kernels"]}
    assert {f"{name} d128 bf16" for name in ("matching", "merge", "round") for kind in ("bf16", "fp32")} <= set(kernels)
    assert "paged attention split d128 bf16" in kernels
    assert not [name for name, one in kernels.items() if one["default"] and one["spilled_bytes"]]
    assert all(0 < one["registers"] <= 255 and one["instructions"] > 100 for one in kernels.values())
    assert done.stdout.splitlines()[-1].startswith("| ")
    assert "default configurations that spill: none" in done.stdout


def test_interpreted_kernels_are_refused():
    done = run(interpret=True)
    assert done.returncode == 2
    assert "TRITON_INTERPRET=1" in done.stderr


def test_spills_are_counted():
    assembly = "\n".join(
        [
            "\tv_add_f32 v0, v1, v2",
            "\ts_nop 0",
            "\tscratch_store_dword off, v0, s32",
            "    .private_segment_fixed_size: 28",
            "    .vgpr_count:     128",
        ]
    )
    assert tool._count_amd(assembly) == (128, 28, 2)


def test_cases_have_names_of_their_own_and_complete_signatures():
    code = (
        "from analysis.tools.compile_kernels import all_cases\n"
        "cases = all_cases()\n"
        "assert len({case.name for case in cases}) == len(cases)\n"
        "for case in cases:\n"
        "    missing = set(case.kernel.arg_names) - set(case.signature) - set(case.constants)\n"
        "    assert not missing, (case.name, missing)\n"
        "print(len(cases))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(out.stdout) >= 36
