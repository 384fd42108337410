import pytest
import torch

from centroidkv import presets
from centroidkv.cache import GrowingState
from centroidkv.cache.query_log import QueryLog
from centroidkv.errors import StageError
from centroidkv.queries import SAMPLE, sample_queries
from centroidkv.rotary import Rotary

ROTARY = Rotary.from_theta(1e4, 8)


def steps(*lengths, batch=2):
    queries = torch.randn(batch, 4, sum(lengths), 8)
    return queries, queries.split(lengths, 2)


def all_real(step):
    return torch.ones(step.shape[0], step.shape[2], dtype=torch.bool)


def test_steps_are_sampled_together():
    whole, parts = steps(5, 1, 1)
    log = QueryLog()
    for part in parts:
        log.add(part, all_real(part))
    assert log.sample([0, 1], heads=2).equal(sample_queries(whole, 2))
    assert log.sample([1], heads=2).equal(sample_queries(whole[1:], 2))


def test_padding_and_forgotten_rows_do_not_count():
    whole, _ = steps(6)
    log = QueryLog()
    real = all_real(whole)
    real[0, :4] = False
    log.add(whole, real)
    assert log.sample([0], 2).equal(sample_queries(whole[:1, :, 4:], 2))
    log.forget([0])
    later, _ = steps(2)
    log.add(later, all_real(later))
    assert log.sample([0], 2).equal(sample_queries(later[:1], 2))
    assert log.sample([1], 2).equal(sample_queries(torch.cat((whole, later), 2)[1:], 2))


def test_no_more_is_held_than_two_samples():
    log = QueryLog()
    for _ in range(5):
        long, _ = steps(3 * SAMPLE // 2)
        log.add(long, all_real(long))
        assert log.nbytes <= 2 * 2 * SAMPLE * (4 * 8 * 4 + 1)
    log.forget([0, 1])
    assert log.nbytes == 0


def test_thinning_a_long_step_is_the_even_sample_of_each_row():
    long, _ = steps(2 * SAMPLE + 3)
    real = all_real(long)
    real[1, : SAMPLE + 1] = False
    log = QueryLog()
    log.add(long, real)
    assert log.sample([0], 2).equal(sample_queries(long[:1], 2))
    assert log.sample([1], 2).equal(sample_queries(long[1:, :, SAMPLE + 1 :], 2))


def test_crop_takes_back_the_last_columns():
    whole, parts = steps(5, 3)
    log = QueryLog()
    for part in parts:
        log.add(part, all_real(part))
    log.crop(4)
    assert log.sample([0], 2).equal(sample_queries(whole[:1, :, :4], 2))


def test_a_copy_and_its_original_do_not_touch_each_other():
    whole, _ = steps(4)
    log = QueryLog()
    log.add(whole, all_real(whole))
    twin = log.copy()
    twin.forget([0, 1])
    assert twin.nbytes == 0
    assert log.sample([0], 2).equal(sample_queries(whole[:1], 2))


def grow(lengths, batch, real=None, seed=0):
    """A growing state fed random steps; ``real`` marks the first step's real tokens."""
    torch.manual_seed(seed)
    growing = GrowingState(presets.balanced(30), interval=8, rotary=ROTARY)
    for number, length in enumerate(lengths):
        keys, values = torch.randn(batch, 2, length, 8), torch.randn(batch, 2, length, 8)
        growing.append(keys, values, real if number == 0 else None, torch.randn(batch, 4, length, 8))
    return growing


def test_queries_are_gone_after_an_event_and_back_before_the_next():
    assert grow([60], 1)._queries.nbytes == 0
    assert grow([60, 1, 1], 1)._queries.nbytes > 0
    growing = grow([60, 4, 4], 1)
    assert growing.events == 2
    assert growing._queries.nbytes == 0
    assert growing.nbytes == growing.state.nbytes


def test_a_compressor_that_needs_queries_is_refused_without_them():
    growing = GrowingState(presets.balanced(30), interval=8, rotary=ROTARY)
    with pytest.raises(StageError, match="queries="):
        growing.append(torch.randn(1, 2, 60, 8), torch.randn(1, 2, 60, 8))
    assert growing.state is None
