"""A cache saved, and continued elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import pad

from centroidkv import Budget, Compressor, Rotary, presets
from centroidkv.cache import Offloaded, Quantised
from centroidkv.errors import CentroidKVError, SavedCacheError
from centroidkv.integrations.transformers import CentroidCache, enable, saving, saving_file
from centroidkv.preserve import Recent, Sinks

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

STORAGES = [None, Quantised(8), Quantised(4), Offloaded(), Offloaded(Quantised(8))]


def compressor(budget=0.25):
    return Compressor.builder().preserve(Sinks(4), Recent(16)).budget(budget).build()


def generate(model, ids, cache, new=40, **options):
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)


@torch.no_grad()
def logits_of(model, cache, ids, **options):
    """Logits of ``ids`` one by one."""
    return torch.cat(
        [model(ids[:, i : i + 1], past_key_values=cache, **options).logits for i in range(ids.shape[1])], 1
    )


def alike(one: CentroidCache, two: CentroidCache):
    for a, b in zip(one.layers, two.layers, strict=True):
        assert a.keys.equal(b.keys)
        assert a.values.equal(b.values)
        assert a.get_seq_length() == b.get_seq_length()
    assert replace(one.stats(), bytes=0) == replace(two.stats(), bytes=0)  # spare slots are not saved


@pytest.fixture
def saved(llama, prompt, tmp_path):
    """A model, what it generated, the cache and the file it was saved in."""
    model, path = llama(), tmp_path / "cache.safetensors"
    with enable(model):
        text = generate(model, prompt(150), cache := CentroidCache(compressor(), interval=16), new=21)
    cache.save(path)
    return model, text, cache, path


@pytest.mark.parametrize("storage", STORAGES, ids=repr)
def test_a_loaded_cache_goes_on_bit_by_bit(llama, prompt, tmp_path, storage):
    model, path = llama(), tmp_path / "cache.safetensors"
    with enable(model):
        text = generate(model, prompt(150), cache := CentroidCache(compressor(), 16, storage=storage), new=21)
        cache.save(path)
        again = CentroidCache.load(path, compressor(), config=model.config, storage=storage)
        alike(again, cache)
        assert (again.interval, again.storage) == (16, storage)
        assert logits_of(model, cache, prompt(40)).equal(logits_of(model, again, prompt(40)))
        alike_after = [layer.growing._clocks for layer in again.layers]
        assert alike_after == [layer.growing._clocks for layer in cache.layers]
        generate(model, torch.cat((text, prompt(40), prompt(9)), 1), again)


def test_in_a_new_process_generation_goes_on_with_the_same_tokens(saved, tmp_path):
    model, text, cache, path = saved
    model.save_pretrained(tmp_path / "model")
    torch.save(text, tmp_path / "text.pt")
    script = f"""
        import torch, transformers
        from centroidkv import Compressor
        from centroidkv.integrations.transformers import CentroidCache, enable
        from centroidkv.preserve import Recent, Sinks
        torch.set_num_threads(1)
        model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}).eval()
        small = Compressor.builder().preserve(Sinks(4), Recent(16)).budget(0.25).build()
        cache = CentroidCache.load({str(path)!r}, small, config=model.config)
        text = torch.load({str(tmp_path / "text.pt")!r})
        with enable(model):
            out = model.generate(text, attention_mask=torch.ones_like(text), past_key_values=cache, max_new_tokens=60,
                                 do_sample=False)
        print(out[0].tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True, timeout=240,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    with enable(model):
        expected = generate(model, text, cache, new=60)
    assert json.loads(done.stdout.splitlines()[-1]) == expected[0].tolist()


@pytest.mark.parametrize("storage", [None, Quantised(8)], ids=repr)
@pytest.mark.parametrize("preset", ["rotary", "queries"])
def test_padded_batches_with_their_own_clocks_and_queries(llama, prompt, tmp_path, preset, storage):
    model, path = llama(), tmp_path / "cache"
    make = {"rotary": presets.distinctive(Budget.tokens(90)), "queries": presets.balanced(Budget.tokens(90))}[preset]
    rows = [prompt(n) for n in (300, 37, 101)]
    ids = torch.cat([pad(row, (300 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (300 - row.shape[1], 0)) for row in rows])
    with enable(model):
        text = generate(model, ids, cache := CentroidCache(make, 16, storage=storage), attention_mask=mask, new=20)
        cache.save(path)
        again = CentroidCache.load(path, make, config=model.config, storage=storage)
        alike(again, cache)
        mask = torch.cat((mask, torch.ones(3, 20, dtype=torch.long)), 1)
        assert generate(model, text, again, attention_mask=mask, new=60).equal(
            generate(model, text, cache, attention_mask=mask, new=60)
        )
    found = {tuple(clock.events for clock in layer.growing._clocks) for layer in cache.layers}
    assert len(found) == {"rotary": 1, "queries": 2}[preset]  # of three layers, balanced gives the middle one more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_type(llama, prompt, tmp_path, dtype):
    model = llama().to(dtype)
    with enable(model):
        generate(model, prompt(150), cache := CentroidCache(compressor(), 16, storage=Quantised(8)), new=5)
        cache.save(tmp_path / "cache")
        again = CentroidCache.load(tmp_path / "cache", compressor(), config=model.config, storage=Quantised(8))
        assert again.layers[0].keys.dtype == dtype
        assert logits_of(model, again, prompt(20)).equal(logits_of(model, cache, prompt(20)))


@pytest.mark.parametrize("length", [20, 150])
def test_sliding_windows_of_hybrid_models_are_saved_too(prompt, tmp_path, length):
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=32, max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model, path = transformers.Gemma3ForCausalLM(config).eval(), tmp_path / "cache"
    with enable(model):
        generate(model, prompt(length), cache := CentroidCache(compressor(), 16), new=5)
        cache.save(path)
        again = CentroidCache.load(path, compressor(), config=model.config)
        alike(again, cache)
        assert logits_of(model, again, prompt(60)).equal(logits_of(model, cache, prompt(60)))
    other = transformers.Gemma3TextConfig(**{**config.to_dict(), "sliding_window": 64})
    with pytest.raises(SavedCacheError, match=r"'sliding_window': 32.*'sliding_window': 64"):
        CentroidCache.load(path, compressor(), config=other)


def test_beams_keep_sharing_and_inner_padding_stays_known(llama, prompt, tmp_path):
    model, path = llama(), tmp_path / "cache"
    cache = CentroidCache(compressor(0.5), 16, storage=Quantised(8))
    with enable(model), torch.no_grad():
        mask = torch.ones(2, 60, dtype=torch.long)
        mask[:, 40:45] = 0
        model(prompt(60, batch=2), attention_mask=mask, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.save(path)
    again = CentroidCache.load(path, compressor(0.5), config=model.config, storage=Quantised(8))
    alike(again, cache)
    assert cache._pass.columns.inner
    assert again._pass.columns.inner


def test_a_rotation_given_by_hand_is_in_the_file(llama, prompt, tmp_path):
    model, path, rotary = llama(), tmp_path / "cache", Rotary.from_theta(1e4, 16)
    with enable(model):
        generate(model, prompt(150), cache := CentroidCache(presets.distinctive(90), 16, rotary=rotary), new=5)
        cache.save(path)
        again = CentroidCache.load(path, presets.distinctive(90), config=model.config)
        assert again.rotary.inv_freq.equal(rotary.inv_freq)
        assert logits_of(model, again, prompt(30)).equal(logits_of(model, cache, prompt(30)))


def test_any_flipped_byte_is_noticed(saved):
    model, _, _, path = saved
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    places = [*range(0, 8), *range(8, 8 + header, max(header // 60, 1)), *range(8 + header, len(whole), 4999)]
    for place in (*places, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(SavedCacheError):  # the last line of the loop, so the trace tells the place
            CentroidCache.load(path, compressor(), config=model.config)


@pytest.mark.parametrize("keep", [0, 5, 300, 0.5, -1])
def test_a_truncated_file_is_refused(saved, keep):
    model, _, _, path = saved
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(SavedCacheError, match="damaged or cut off"):
        CentroidCache.load(path, compressor(), config=model.config)


def test_foreign_and_missing_files_are_refused(llama, tmp_path):
    config = llama().config
    (tmp_path / "text").write_text("hello " * 100)
    save_file({"weight": torch.ones(3)}, tmp_path / "weights")
    for name in ("text", "weights"):
        with pytest.raises(SavedCacheError, match="not a saved cache"):
            CentroidCache.load(tmp_path / name, compressor(), config=config)
    with pytest.raises(FileNotFoundError):
        CentroidCache.load(tmp_path / "none", compressor(), config=config)


def rewrite(path, change):
    """The same file with another header, checksum and all."""
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    header = json.dumps(change(json.loads(metadata[saving.HEADER])))
    save_file(tensors, path, {saving.HEADER: header, saving.CHECKSUM: saving_file.checksum(header, tensors)})


def test_another_version_is_refused(saved):
    model, _, _, path = saved
    rewrite(path, lambda header: header | {"version": 99})
    with pytest.raises(SavedCacheError, match="version 99, this release reads 2"):
        CentroidCache.load(path, compressor(), config=model.config)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 2), ("head_dim", 32), ("num_key_value_heads", 4), ("model_type", "mistral"),
     ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}), ("vocab_size", 102)],
)  # fmt: skip
def test_another_model_is_refused_by_the_field_that_differs(saved, field, value):
    model, _, _, path = saved
    import copy

    config = copy.deepcopy(model.config)
    object.__setattr__(config, field, value)
    with pytest.raises(SavedCacheError, match=f"{field}.*config= has .*{field}"):
        CentroidCache.load(path, compressor(), config=config)


def test_another_compressor_is_refused_unless_meant(saved, prompt):
    model, _, cache, path = saved
    with pytest.raises(SavedCacheError, match="other_compressor=True"):
        CentroidCache.load(path, compressor(0.5), config=model.config)
    again = CentroidCache.load(path, compressor(0.5), config=model.config, other_compressor=True)
    alike(again, cache)
    with enable(model):
        logits_of(model, again, prompt(40))


def test_another_storage_is_refused_but_offloading_may_be_added(saved, llama, prompt, tmp_path):
    model, _, _, path = saved
    with pytest.raises(SavedCacheError, match="pass the same storage"):
        CentroidCache.load(path, compressor(), config=model.config, storage=Quantised(8))
    with enable(model):
        generate(model, prompt(150), cache := CentroidCache(compressor(), 16, storage=Quantised(4)), new=5)
    cache.save(path)
    for wrong in (None, Quantised(8), Quantised(4, group=16), Offloaded()):
        with pytest.raises(SavedCacheError, match="pass the same storage"):
            CentroidCache.load(path, compressor(), config=model.config, storage=wrong)
    again = CentroidCache.load(path, compressor(), config=model.config, storage=Offloaded(Quantised(4)))
    alike(again, cache)


def test_empty_and_half_finished_caches_are_not_saved(llama, prompt, tmp_path):
    model, path = llama(), tmp_path / "cache"
    for empty in (CentroidCache(compressor()), CentroidCache(compressor(), config=model.config)):
        with pytest.raises(SavedCacheError, match="no tokens"):
            empty.save(path)
    cache = CentroidCache(compressor(0.5))
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
    with enable(model), torch.no_grad(), pytest.raises(RuntimeError, match="lost"):
        model(prompt(50), past_key_values=cache)
    broken.remove()
    with pytest.raises(SavedCacheError, match="half-way"):
        cache.save(path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_the_old_file_whole(saved, monkeypatch, prompt):
    model, _, cache, path = saved
    before = path.read_bytes()
    with enable(model):
        logits_of(model, cache, prompt(5))
    for error, told in ((OSError("no space left"), SavedCacheError), (KeyboardInterrupt(), KeyboardInterrupt)):
        monkeypatch.setattr(saving_file, "_bytes", lambda tensor, error=error: (_ for _ in ()).throw(error))
        monkeypatch.setattr(saving_file, "checksum", lambda header, tensors: "made up")
        with pytest.raises(told):
            cache.save(path)
        assert path.read_bytes() == before
        assert [file.name for file in path.parent.iterdir()] == [path.name]
    monkeypatch.undo()
    with pytest.raises(SavedCacheError, match="cannot be written"):
        cache.save(path.parent / "no such folder" / "cache")
    cache.save(path)
    assert path.read_bytes() != before
    alike(CentroidCache.load(str(path), compressor(), config=model.config), cache)


def test_saving_changes_nothing_and_the_file_is_hardly_larger_than_the_cache(saved, prompt):
    _, _, cache, path = saved
    assert path.stat().st_size < cache.stats().bytes + 16_000
    before = cache.stats()
    cache.save(path)
    assert cache.stats() == before
    assert issubclass(SavedCacheError, CentroidKVError)
