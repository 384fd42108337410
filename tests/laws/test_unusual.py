"""What the protocols allow passes the laws, however unusual it is, and the library takes it."""

from __future__ import annotations

import pytest
import torch

from centroidkv import Budget, Compressor, KVState, testing
from centroidkv.cache import GrowingState, Offloaded
from centroidkv.cache.storage import Storage
from centroidkv.errors import StageError
from centroidkv.preserve import Sinks
from tests.laws import unusual

CHECKS = {
    testing.check_preserver: unusual.PRESERVERS,
    testing.check_partition: unusual.PARTITIONS,
    testing.check_schedule: unusual.SCHEDULES,
    testing.check_similarity: unusual.SIMILARITIES,
    testing.check_matcher: unusual.MATCHERS,
    testing.check_aggregator: unusual.AGGREGATORS,
    testing.check_allocation: unusual.ALLOCATIONS,
    testing.check_storage: unusual.STORAGES,
}
CASES = [
    pytest.param(check, stage, id=f"{check.__name__}: {name}")
    for check, row in CHECKS.items()
    for name, stage in row.items()
]


@pytest.mark.parametrize(("check", "stage"), CASES)
def test_the_laws_let_it_pass(check, stage):
    stage, options = stage if isinstance(stage, tuple) else (stage, {})
    check(stage, 15, **options)


@pytest.mark.parametrize(
    ("part", "stages"),
    [
        ("preserve", unusual.PRESERVERS),
        ("partition", unusual.PARTITIONS),
        ("schedule", unusual.SCHEDULES),
        ("similarity", unusual.SIMILARITIES),
        ("matching", {name: stage for name, (stage, _) in unusual.MATCHERS.items()}),
        ("aggregate", unusual.AGGREGATORS),
    ],
)
def test_a_compressor_takes_it(part, stages):
    state = KVState.from_kv(torch.randn(2, 2, 60, 8), torch.randn(2, 2, 60, 4))
    for stage in stages.values():
        builder = Compressor.builder().preserve(Sinks(1)).budget(Budget.ratio(0.5))
        smaller = getattr(builder, part)(stage).build()(state, strict=False)
        assert smaller.slots <= 60
        assert smaller.seen.tolist() == [60, 60]


def test_a_storage_of_put_and_get_serves_a_cache():
    compressor = Compressor.builder().preserve(Sinks(1)).budget(Budget.tokens(20)).build()
    layers = [GrowingState(compressor, 10, storage=storage) for storage in (None, *unusual.STORAGES.values())]
    layers.append(GrowingState(compressor, 10, storage=Offloaded(unusual.PutAndGet())))
    torch.manual_seed(0)
    for length in (60, 1, 12):
        keys, values = torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 4)
        for layer in layers:
            layer.fetch()
        plain, *others = [layer.append(keys, values) for layer in layers]
        assert all(a is b or a.equal(b) for other in others for a, b in zip(plain, other, strict=True))
    packed, facts = layers[1].pack()
    layers[1].unpack(packed, facts, torch.device("cpu"))
    assert layers[1].state.keys.equal(layers[0].state.keys)
    assert layers[2].pack()[1]["form"] == "slow"


@pytest.mark.parametrize("wrong", [unusual.PutAndGet, object(), "int8"])
def test_what_cannot_put_and_get_is_refused(wrong):
    assert isinstance(Offloaded(), Storage)
    with pytest.raises(StageError, match="put and get"):
        GrowingState(Compressor.builder().build(), 8, storage=wrong)
    with pytest.raises(StageError, match="takes a storage"):
        Offloaded(wrong)
