import pytest
import torch

from centroidkv import Budget, Compressor, presets
from centroidkv.cache import GrowingState
from centroidkv.cache.stats import collect_stats
from centroidkv.errors import CacheError, StageError
from centroidkv.preserve import Recent, Sinks


def compressor(budget):
    return Compressor.builder().preserve(Sinks(2), Recent(8)).budget(budget).build()


def tokens(count, batch=1):
    return torch.randn(batch, 2, count, 8), torch.randn(batch, 2, count, 8)


def test_grows_to_budget_plus_interval_and_no_further():
    layer = GrowingState(compressor(Budget.tokens(50)), interval=16)
    layer.append(*tokens(200))
    assert layer.physical == 50
    sizes = []
    for _ in range(100):
        keys, _, degree = layer.append(*tokens(1))
        sizes.append((keys.shape[2], layer.physical))
        assert degree.shape == keys.shape[:3]
    assert max(attended for attended, _ in sizes) == 50 + 16
    assert max(held for _, held in sizes) == 50 + 15
    assert layer.logical == 300
    assert layer.state.degree.sum(-1).tolist() == [[300.0, 300.0]]


def test_the_triggering_tokens_attend_to_everything():
    layer = GrowingState(compressor(0.25), interval=16)
    keys, values = tokens(100)
    attended, _, degree = layer.append(keys, values)
    assert torch.equal(attended, keys)
    assert degree is None
    assert layer.physical == 25


def test_full_keys_are_released():
    layer = GrowingState(compressor(0.25), interval=16)
    layer.append(*tokens(400))
    for tensor in (layer.state.keys, layer.state.values):
        assert tensor.untyped_storage().nbytes() == 2 * 100 * 8 * 4


def test_compression_starts_as_soon_as_over_budget_then_every_interval():
    layer = GrowingState(compressor(Budget.tokens(20)), interval=10)
    for count in range(1, 52):
        layer.append(*tokens(1))
        assert layer.events == (0 if count <= 20 else 1 + (count - 21) // 10)


def test_a_ratio_that_cannot_hold_the_preserved_slots_waits_until_it_can():
    layer = GrowingState(compressor(0.25), interval=4)
    for _ in range(43):
        layer.append(*tokens(1))
    assert (layer.events, layer.physical) == (0, 43)  # a quarter of 43 is 10, all of it sinks and recent
    layer.append(*tokens(1))
    assert (layer.events, layer.physical) == (1, 11)


def test_positions_keep_counting_tokens():
    layer = GrowingState(compressor(Budget.tokens(20)), interval=10)
    layer.append(*tokens(100))
    layer.append(*tokens(3))
    assert layer.state.positions[0, 0, -3:].tolist() == [100, 101, 102]


def test_a_failed_append_changes_nothing():
    layer = GrowingState(compressor(Budget.tokens(20)), interval=10)
    layer.append(*tokens(15))
    before = (layer.state, layer.logical, layer.events)
    keys, values = tokens(10)
    keys[0, 0, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        layer.append(keys, values)
    assert (layer.state, layer.logical, layer.events) == before
    layer.append(*tokens(10))
    assert (layer.physical, layer.logical) == (20, 25)


def test_rows_of_a_padded_batch_fit_one_by_one():
    layer = GrowingState(compressor(0.5), interval=10)
    real = torch.ones(2, 100, dtype=torch.bool)
    real[1, :90] = False
    layer.append(*tokens(100, batch=2), real)
    assert layer.state.live.sum(-1).tolist() == [[50, 50], [10, 10]]


def test_crop_takes_back_what_was_not_clustered():
    layer = GrowingState(compressor(Budget.tokens(20)), interval=50)
    layer.append(*tokens(100))
    kept = layer.state.keys.clone()
    layer.append(*tokens(7))
    layer.crop(7)
    assert torch.equal(layer.state.keys, kept)
    assert (layer.logical, layer.state.seen.tolist()) == (100, [100])
    with pytest.raises(CacheError, match="merged tokens cannot be separated"):
        layer.crop(1)


def test_rows_move_together():
    layer = GrowingState(compressor(Budget.tokens(20)), interval=50)
    layer.append(*tokens(60, batch=3))
    before = layer.state
    layer.reorder(torch.tensor([2, 0, 0]))
    for part in ("keys", "values", "degree", "positions"):
        assert torch.equal(getattr(layer.state, part), getattr(before, part)[[2, 0, 0]])


def test_another_batch_is_refused():
    layer = GrowingState(compressor(0.5), interval=10)
    layer.append(*tokens(5))
    with pytest.raises(CacheError, match="reset"):
        layer.append(*tokens(5, batch=2))


def test_stats_add_up():
    layers = [GrowingState(compressor(0.25), interval=10) for _ in range(3)]
    assert collect_stats(layers).logical == 0
    for layer in layers:
        layer.append(*tokens(400))
    stats = collect_stats(layers)
    assert (stats.layers, stats.events, stats.logical, stats.physical) == (3, 1, 400, 100)
    assert stats.logical == stats.physical + stats.merged + stats.evicted
    assert stats.bytes == 3 * 2 * 100 * (8 * 4 * 2 + 4 + 4)
    assert stats.bytes_full == 3 * 2 * 400 * 8 * 4 * 2
    assert "400 tokens in 100 slots" in str(stats)


def test_stats_count_evictions():
    layer = GrowingState(presets.streaming_llm(0.25), interval=10)
    layer.append(*tokens(400))
    stats = collect_stats([layer])
    assert (stats.evicted, stats.merged) == (300, 0)


@pytest.mark.parametrize("interval", [0, -1, 1.5])
def test_bad_interval_is_refused(interval):
    with pytest.raises(StageError, match="interval"):
        GrowingState(compressor(0.5), interval)


def test_waiting_tokens_can_be_taken_back_and_are_clustered_with_the_crop():
    small = Compressor.builder().preserve(Sinks(1), Recent(2)).budget(0.25).build()
    keys, values = torch.randn(2, 1, 2, 45, 8)
    waiting, plain = GrowingState(small, interval=4), GrowingState(small, interval=4)
    waiting.waits = True
    waiting.append(keys, values)
    assert waiting.physical == 45
    waiting.crop(5)
    plain.append(keys[:, :, :40], values[:, :, :40])
    assert waiting.physical == plain.physical == 10
    assert torch.equal(waiting.state.keys, plain.state.keys)
    assert waiting.waits
    for _ in range(2):  # nobody crops any more
        waiting.append(keys[:, :, :4], values[:, :, :4])
    assert not waiting.waits
    assert waiting.physical < 18
