"""The decode benchmark: its variants compute one thing, and a small run prints and writes what was measured."""

from __future__ import annotations

import json

import pytest
import torch

from analysis.benchmarks import bench_decode


def test_all_variants_compute_the_same_attention():
    options = bench_decode.arguments(["--heads", "2", "--groups", "3", "--size", "16"])
    inputs = bench_decode.inputs(37, options)
    wanted = bench_decode.VARIANTS["reference"](*inputs)
    for name in ("repeat", "enable_gqa", "sdpa"):
        assert torch.allclose(bench_decode.VARIANTS[name](*inputs), wanted, atol=1e-6), name


def test_a_small_run_prints_its_table_last_and_writes_what_it_measured(tmp_path, capsys):
    path = tmp_path / "decode.json"
    threads = torch.get_num_threads()
    bench_decode.main(
        ["--tokens", "64", "128", "--heads", "2", "--size", "16", "--repeats", "1", "--device", "cpu", "--threads", "1",
         "--json", str(path)]
    )  # fmt: skip
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1].split()[1:5] == ["128", "|", "triton", "|"]
    assert "not measured" in lines[-1]
    assert sum("sdpa" in line and line.startswith("|") for line in lines) == 2
    written = json.loads(path.read_text())
    assert {"centroidkv", "commit", "torch", "triton", "device"} <= set(written["environment"])
    assert written["settings"]["dtype"] == "float32"
    assert written["auto"] == "sdpa"
    assert written["shares"] == [1.0, 0.5, 0.25]
    assert set(written["seconds"]) == {"64", "128"}
    for name, taken in written["seconds"]["128"].items():
        assert taken is None if name == "triton" else all(seconds > 0 for seconds in taken)


def test_the_table_divides_by_the_right_numbers():
    table = bench_decode.table({4096: {"repeat": [8.0, 4.0, 2.0], "sdpa": [4.0, 1.0, 0.5], "triton": None}})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert rows[1] == ["4096", "sdpa", "4000.000", "4.00", "8.00", "2.00"]
    assert rows[2] == ["4096", "triton", "not measured", "", "", ""]


@pytest.mark.parametrize("name", list(bench_decode.VARIANTS))
def test_only_the_interpreted_kernel_is_left_out_on_the_cpu(name):
    reason = bench_decode.why_not_measured(name, "cpu")
    assert ("interpreter" in reason) if name == "triton" else reason is None
