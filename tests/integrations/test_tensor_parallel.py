"""CentroidCache in a model spread over two processes: every rank clusters the KV heads it holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensor_parallel
import torch

from centroidkv import presets
from centroidkv.errors import BackendError
from centroidkv.integrations.transformers import heads

transformers = pytest.importorskip("transformers")

RANKS = 2
PER_HEAD = ("centroidkv", "distinctive", "knorm")
POOLED = ("mean of heads", "passages", "balanced")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(run of one process, [runs of the ranks])."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no distributed, or no gloo for the CPU")
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    if release < (5, 24):
        pytest.skip("before 5.24 a cache needs enable(model), and tp_plan is asked for in another way")
    folder = tmp_path_factory.mktemp("tensor_parallel")
    tensor_parallel.save_model(folder)
    root = Path(__file__).parents[2]
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *(tensor_parallel.__file__, str(folder), str(folder)),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    single = {name: tensor_parallel.run(model, compressor) for name, compressor in tensor_parallel.cases().items()}
    return single, [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PER_HEAD)
def test_decisions_per_head_are_those_of_one_process(runs, name):
    single, ranks = runs
    expected = single[name]
    # Ranks add up their halves of hidden_size products in another order: a few units in the last place of float32
    # after every reduction, two per layer, on logits of about one.
    tolerance = 16 * torch.finfo(torch.float32).eps * float(expected["logits"].abs().max().clamp(min=1))
    for rank, found in enumerate(ranks):
        assert found["local key rows"] == 2 * 8  # half of the 4 KV heads
        got = found[name]
        assert got["tokens"].equal(expected["tokens"])
        torch.testing.assert_close(got["logits"], expected["logits"], atol=tolerance, rtol=0)
        for kind in ("positions", "degrees"):
            for mine, all_heads in zip(got[kind], expected[kind], strict=True):
                assert mine.equal(all_heads[:, 2 * rank : 2 * rank + 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLED)
def test_decisions_for_all_heads_together_are_refused(runs, name):
    single, ranks = runs
    assert "error" not in single[name]
    assert all(found[name]["error"].startswith("BackendError: this process holds 2 of 4 KV heads") for found in ranks)


def test_what_pools_heads_says_so():
    pooled = {name for name, preset in presets.ALL.items() if preset(0.25).pools_heads}
    assert pooled == {"balanced", "tome"}
    cases = tensor_parallel.cases()
    assert [name for name, compressor in cases.items() if compressor.pools_heads] == list(POOLED)


def test_only_a_process_with_some_of_the_heads_is_refused(monkeypatch):
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4)
    heads.check_heads(presets.balanced(0.25), 2, config)  # one process: a model with heads of its own counting
    monkeypatch.setattr(heads, "_several_processes", lambda: True)
    heads.check_heads(presets.balanced(0.25), 4, config)
    heads.check_heads(presets.distinctive(0.25), 2, config)
    with pytest.raises(BackendError, match=r"2 of 4 KV heads.*presets\.distinctive"):
        heads.check_heads(presets.balanced(0.25), 2, config)
