"""similarity and curves: against brute force, on keys whose curve is known, and end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from analysis.reproduce import similarity
from analysis.reproduce.curves import (
    Keys,
    bends_down,
    curves,
    full_layers,
    is_convex,
    is_monotone,
    keys_of,
    octave_shares,
    octaves,
    rises,
    shape_shares,
)
from analysis.reproduce.similarity_pictures import heatmap_panels, thinned
from centroidkv import Rotary
from centroidkv.errors import EvaluationError


def test_curves_equal_the_definition():
    keys = torch.randn(2, 3, 12, 4)
    found = curves(keys, 5)
    for layer, head, distance in ((0, 0, 1), (1, 2, 3), (1, 0, 5)):
        k = keys[layer, head]
        pairs = [torch.cosine_similarity(k[i], k[i + distance], dim=0) for i in range(12 - distance)]
        torch.testing.assert_close(found[layer, head, distance - 1], torch.stack(pairs).mean())


def test_curves_of_planted_keys_are_known():
    # Unit vectors turning by a fixed angle per token: f(d) = cos(d * angle), concave and falling up to a right angle.
    angle = torch.arange(40) * 0.05
    turning = torch.stack((angle.cos(), angle.sin()), -1)[None, None]
    expected = (torch.arange(1, 21) * 0.05).cos()
    torch.testing.assert_close(curves(turning, 20)[0, 0], expected)
    assert shape_shares(curves(turning, 20)) == (1.0, 0.0, 0.0)
    assert octave_shares(curves(turning, 20)) == (1.0, 0.0, 0.0)


def test_keys_before_rope_are_those_the_model_projected_and_after_rope_those_it_cached(llama, ids):
    tokens = ids(24)
    seen = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda m, a, out: seen.append(out)) for layer in llama.model.layers
    ]
    keys = keys_of(llama, tokens)
    for hook in hooks:
        hook.remove()
    before = torch.stack([out[0].unflatten(-1, (2, -1)).transpose(0, 1) for out in seen])
    torch.testing.assert_close(keys.before, before, atol=1e-5, rtol=1e-4)
    cached = llama(tokens, use_cache=True).past_key_values
    torch.testing.assert_close(keys.after, torch.stack([layer.keys[0] for layer in cached.layers]))
    assert not torch.allclose(keys.before, keys.after, atol=1e-2)


def test_only_full_attention_layers_are_measured_with_their_own_rotation(gemma3, ids):
    assert full_layers(gemma3.config) == (1, 3)
    tokens = ids(24)
    seen = []
    for i in (1, 3):
        gemma3.model.layers[i].self_attn.k_norm.register_forward_hook(lambda m, a, out: seen.append(out))
    keys = keys_of(gemma3, tokens)
    assert keys.layers == (1, 3)
    torch.testing.assert_close(keys.before, torch.cat(seen), atol=1e-5, rtol=1e-4)


def test_places_where_a_curve_rises_or_bends_down():
    curve = torch.tensor([1.0, 2.0, 1.5, 1.4, 1.0, 1.0])
    assert rises(curve).tolist() == [True, False, False, False, False]
    assert bends_down(curve).tolist() == [True, False, True, False]
    short = curve[2:].tolist()
    assert is_monotone(short)
    assert not is_convex(short)
    lines = torch.stack((curve, torch.arange(6, 0, -1.0) ** 2, torch.ones(6)))
    assert shape_shares(lines) == pytest.approx((2 / 3, 2 / 3, 2 / 3))


def test_octaves_hide_noise_between_neighbours_and_keep_the_shape():
    distance = torch.arange(1, 64, dtype=torch.float32)
    wiggle = 0.01 * (-1) ** torch.arange(63)
    noisy = (1 / distance + wiggle)[None]
    assert shape_shares(noisy) == (0.0, 0.0, 0.0)
    assert octave_shares(noisy) == (1.0, 1.0, 1.0)
    assert octave_shares(-noisy) == (0.0, 0.0, 0.0)
    places, means = octaves(distance[None])
    assert places.tolist() == means[0].tolist() == [1.0, 2.5, 5.5, 11.5, 23.5, 47.5]


def test_drawn_curves_keep_near_points_and_average_far_ones():
    distance, values = thinned(torch.arange(1, 301, dtype=torch.float32).repeat(2, 1))
    assert distance[:8].tolist() == list(range(1, 9))
    assert len(distance) < 100
    assert torch.equal(values, distance.expand(2, -1))


def test_failures_are_counted_where_they_are():
    curve = torch.arange(400, 0, -1.0).square()[None, None].repeat(2, 2, 1)
    curve[0, 0, 1] = 1e6  # rises from 1 to 2, and bends down there
    shares = similarity.failure_shares(curve)
    assert shares["1"] == (0.25, 0.25)
    assert shares["2"] == (0.0, 0.0)
    assert list(shares) == ["1", "2", "3", "4", "5..8", "9..32", "33..256", "257..400"]
    assert sum(sum(pair) for pair in shares.values()) == 0.5
    assert list(similarity.failure_shares(curve[..., :200]))[-1] == "9..32"  # no distance is beyond 256


def test_heat_maps_show_the_chosen_head_and_refuse_what_is_not_there():
    keys = torch.randn(2, 2, 20, 4)
    turned = Rotary.from_theta(1e4, 4).rotate(keys, torch.arange(20).expand(2, 2, 20))
    both = Keys((3, 7), keys, turned)
    panels = heatmap_panels(both, [(3, 0), (7, 1)], window=5)
    k = keys[1, 1, -5:]
    torch.testing.assert_close(panels["before RoPE"][1], torch.cosine_similarity(k[:, None], k[None], dim=-1))
    assert panels["after RoPE"].shape == (2, 5, 5)
    with pytest.raises(EvaluationError, match="layer 4"):
        heatmap_panels(both, [(4, 0)], 5)
    with pytest.raises(EvaluationError, match="KV head 2"):
        heatmap_panels(both, [(3, 2)], 5)
    with pytest.raises(EvaluationError, match="21"):
        heatmap_panels(both, [(3, 0)], 21)


def test_a_text_that_is_too_short_is_refused(letters):
    with pytest.raises(EvaluationError, match="has 3 tokens, not 4"):
        similarity.read_ids(letters, "abc", 4)
    with pytest.raises(EvaluationError, match="longer text"):
        curves(torch.randn(1, 1, 5, 4), 5)


def test_the_whole_program_on_a_folder_and_a_text_file(tmp_path, monkeypatch, capsys, gemma3, letters):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 20)
    monkeypatch.setattr(similarity, "load_named", lambda name: (gemma3, letters))
    similarity.main(
        [
            *("--model", "some/tiny", "--text", str(tmp_path / "text.txt"), "--tokens", "400", "--longest", "300"),
            *("--window", "40", "--heatmap", str(tmp_path / "h.png"), "--curves", str(tmp_path / "c.png")),
            *("--json", str(tmp_path / "s.json")),
        ]
    )
    out = capsys.readouterr().out
    assert "tiny, 400 tokens, 2 of 4 layers (full attention) x 1 KV heads" in out
    assert out.rstrip().splitlines()[-1].startswith("| after RoPE  | octaves of 1..255")
    for name in ("h.png", "c.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / name).stat().st_size < 200_000
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["settings"]["text"] == "text.txt"
    assert {"commit", "torch", "transformers"} <= set(found["environment"])
    assert found["layers"] == [1, 3]
    assert str(tmp_path) not in Path(tmp_path / "s.json").read_text()
