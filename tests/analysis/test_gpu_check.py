from itertools import islice

import pytest

from analysis.benchmarks import gpu_check
from centroidkv.kernels import why_not_triton

pytestmark = pytest.mark.skipif(why_not_triton("cpu") is not None, reason=str(why_not_triton("cpu")))


@pytest.fixture
def short(monkeypatch):
    """A few comparisons, no benchmarks."""
    every = list(gpu_check.checks("cpu", small=True))
    wanted = [check for check in every if check[0].split()[0] in ("round", "attention", "paged") and "T63" in check[0]]
    monkeypatch.setattr(gpu_check, "checks", lambda device, small: islice(wanted, 5))
    monkeypatch.setattr(gpu_check, "benchmarks", lambda device, small: {"times": "none"})


def test_comparisons_hold_and_the_table_says_so(short, capsys, tmp_path):
    assert gpu_check.main(["--device", "cpu", "--json", str(tmp_path / "check.json")]) == 0
    printed = capsys.readouterr().out
    assert "5 of 5 comparisons hold" in printed.splitlines()[-1]
    assert (tmp_path / "check.json").exists()


def test_a_wrong_kernel_is_reported_and_fails_the_command(short, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "apart", lambda ours, theirs: 0.5)
    assert gpu_check.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED round sequence T63" in printed
    assert "0 of 5 comparisons hold" in printed


def test_a_kernel_that_raises_is_a_failure_not_the_end(short, capsys, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(gpu_check, "degree_attention", broken)
    assert gpu_check.main(["--device", "cpu"]) == 1
    assert "no such instruction" in capsys.readouterr().out
