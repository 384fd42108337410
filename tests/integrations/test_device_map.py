"""CentroidCache in models whose weights accelerate keeps elsewhere: its hooks wrap every module's forward."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from centroidkv import presets
from centroidkv.integrations.transformers import CentroidCache, enable

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2.self_attn": "disk",  # the attention module is wrapped itself, not only by its layer
    "model.layers.2.mlp": "cpu",
    "model.layers.2.input_layernorm": "cpu",
    "model.layers.2.post_attention_layernorm": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def spread(model, kind, folder):
    """``model`` with its weights spread in one of the ways accelerate knows on a machine without a GPU."""
    if kind == "cpu_offload":
        accelerate.cpu_offload(model, execution_device="cpu")
    elif kind == "disk_offload":
        accelerate.disk_offload(model, str(folder), execution_device="cpu")
    elif kind == "dispatch_model":
        accelerate.dispatch_model(model, MAP, main_device="cpu", offload_dir=str(folder), force_hooks=True)
    else:
        model.save_pretrained(folder / "model")
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder / "model", device_map=MAP, offload_folder=str(folder / "weights"), dtype=torch.float32
        ).eval()
    hooked = [name for name, part in model.named_modules() if hasattr(part, "_hf_hook")]
    assert any("self_attn" in name for name in hooked)
    return model


def generate(model, ids, preset, mask=None):
    cache = CentroidCache(presets.ALL[preset](0.3), interval=8)
    mask = torch.ones_like(ids) if mask is None else mask
    with enable(model):
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=24, do_sample=False, attention_mask=mask, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    assert cache.stats().events > 2
    return torch.stack(out.logits), cache


# balanced reads the queries in the attention module's frame, distinctive the rotation from its configuration.
@pytest.mark.parametrize("preset", ["centroidkv", "distinctive", "balanced"])
@pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload", "dispatch_model", "device_map"])
def test_weights_elsewhere_change_nothing(llama, prompt, tmp_path, kind, preset):
    ids, model = prompt(400), spread(llama(), kind, tmp_path)
    plain = llama()
    if kind == "device_map":  # products of single tokens differ in the last digit where weights lie otherwise in memory
        plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    expected, twin = generate(plain, ids, preset)
    got, cache = generate(model, ids, preset)
    assert torch.equal(got, expected)
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert layer.growing.state.positions.equal(other.growing.state.positions)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_is_seen_through_the_hooks(llama, prompt, tmp_path, attention):
    ids = torch.cat((prompt(400), pad(prompt(350), (50, 0))))
    mask = torch.cat((torch.ones(1, 400), pad(torch.ones(1, 350), (50, 0)))).long()
    expected, _ = generate(llama(attention), ids, "centroidkv", mask)
    got, _ = generate(spread(llama(attention), "dispatch_model", tmp_path), ids, "centroidkv", mask)
    assert torch.equal(got, expected)
