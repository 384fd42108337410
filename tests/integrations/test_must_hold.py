"""What must hold on every machine: padded batches equal their rows' own runs, and memory really falls."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

transformers = pytest.importorskip("transformers")

from matrix_models import CACHE_NAME, FAMILIES  # noqa: E402

from centroidkv import presets  # noqa: E402
from centroidkv.integrations.transformers import CentroidCache, enable, load_smollm2  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
LENGTHS = (37, 512, 1000, 2048)


def generate(model, ids, mask, cache, new):
    options = {CACHE_NAME: cache, "attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new}
    return model.generate(ids, do_sample=False, pad_token_id=0, **options)[:, -new:]


def rows_equal_their_own_runs(model, vocabulary, new):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, vocabulary, (1, n), generator=generator) for n in LENGTHS]
    ids = torch.cat([pad(row, (LENGTHS[-1] - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (LENGTHS[-1] - row.shape[1], 0)) for row in rows])
    with enable(model):
        together = generate(model, ids, mask, cache := CentroidCache(presets.centroidkv(0.25), interval=32), new)
        assert cache.stats().physical <= 0.25 * (2048 + new) + 32
        for text, row in zip(together, rows, strict=True):
            own = CentroidCache(presets.centroidkv(0.25), interval=32)
            alone = generate(model, row, torch.ones_like(row), own, new)[0]
            assert text.tolist() == alone.tolist(), f"the row of {row.shape[1]} tokens"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_padded_batch_of_four_equals_its_rows_own_runs_for_100_tokens(family):
    rows_equal_their_own_runs(FAMILIES[family].make(), 97, new=100)


@pytest.mark.slow
def test_a_padded_batch_of_four_equals_its_rows_own_runs_on_smollm2():
    """24 tokens: 100 take minutes on two cores. On real text all rows would soon say different things as well."""
    try:
        model, _ = load_smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    rows_equal_their_own_runs(model, 49000, new=24)


def live_tensors():
    """All live tensors of the process, whoever holds them."""
    gc.collect()
    return [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]


def bytes_since(before):
    """Bytes of the storages of the tensors that were not there ``before``, each storage once.

    Older ones are not touched: what flex attention compiled with in another test has no storage to ask for.
    """
    known = {id(x) for x in before}
    new = [x.untyped_storage() for x in live_tensors() if id(x) not in known]
    return sum({storage.data_ptr(): storage.nbytes() for storage in new}.values())


@torch.no_grad()
def test_the_storages_that_stay_alive_are_a_quarter():
    """Of all tensors of the process, not of those that the cache admits to."""
    model = FAMILIES["llama"].make(head_dim=64)
    ids = torch.randint(3, 97, (2, 600))
    held = {}
    for name, cache in (("full", transformers.DynamicCache()), ("ours", CentroidCache(presets.centroidkv(0.25)))):
        with enable(model):
            before = live_tensors()
            model(ids, **{CACHE_NAME: cache}, logits_to_keep=1)
            held[name] = bytes_since(before)
        if name == "ours":
            assert cache.stats().bytes == pytest.approx(held[name], rel=0.02)
    full = 2 * 2 * 2 * 600 * 2 * 64 * 4  # keys and values, layers, rows, tokens, heads, size, bytes
    assert held["full"] == pytest.approx(full, rel=0.02)
    assert held["ours"] <= 0.27 * full


RESIDENT = """
import ctypes, gc, os, sys, torch, transformers
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
from matrix_models import CACHE_NAME, FAMILIES
from centroidkv import presets
from centroidkv.integrations.transformers import CentroidCache, enable

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator holds back is not the cache's
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def cache():
    return CentroidCache(presets.centroidkv(0.25)) if sys.argv[1] == "ours" else transformers.DynamicCache()

model = FAMILIES["llama"].make(head_dim=256, num_key_value_heads=4)
ids = torch.randint(3, 97, (1, 3000))
with torch.no_grad(), enable(model):
    for _ in range(2):  # the first run allocates what every run needs
        kept = None
        before = resident()
        kept = cache()
        model(ids, **{CACHE_NAME: kept}, logits_to_keep=1)
        grown = resident() - before
print(grown)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident set from Linux's /proc")
def test_the_resident_set_of_the_process_falls_too():
    """Two fresh processes, 49 MB of keys and values each before compression."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parents[1])}
    grown = {
        kind: int(
            subprocess.run(
                [sys.executable, "-c", RESIDENT, kind, str(here)], env=environment, capture_output=True, text=True,
                timeout=300, check=True,
            ).stdout
        )
        for kind in ("full", "ours")
    }  # fmt: skip
    full = 2 * 2 * 3000 * 4 * 256 * 4
    assert grown["full"] >= 0.9 * full
    assert grown["ours"] <= 0.3 * full, grown
