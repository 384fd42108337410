"""The benchmarks of rounds and of generation: small runs measure what they say."""

import json

import pytest
import torch

from analysis.benchmarks import bench_generate, bench_round
from analysis.benchmarks.timing import PeakBytes, seconds

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


def test_a_round_merges_half_of_what_is_not_preserved():
    assert bench_round.one_round(1000).plan(1000).removed == (466,)
    for compressor in bench_round.competitors(1000).values():
        assert compressor.plan(1000).final == bench_round.one_round(1000).plan(1000).final


def test_bench_round_prints_its_table_last_and_writes_what_it_measured(tmp_path, capsys):
    path = tmp_path / "round.json"
    bench_round.main(
        ["--tokens", "400", "800", "--slow", "400", "--heads", "1", "--size", "8", "--repeats", "1", "--threads", "1",
         "--json", str(path)]
    )  # fmt: skip
    last = capsys.readouterr().out.strip().splitlines()[-1].split("|")
    assert last[1].strip() == "800"
    assert [cell.strip() for cell in last[5:8]] == ["-", "-", "-"]  # the slow ones stop at --slow
    written = json.loads(path.read_text())
    assert {"all pairs", "k-means", "round, reference"} <= set(written["seconds"]["400"])
    assert all(value > 0 for name, value in written["seconds"]["400"].items() if name != "extra memory")
    assert {"commit", "torch", "triton", "device"} <= set(written["environment"])


def test_extra_memory_counts_what_lives_at_once_beyond_the_result():
    state = bench_round.KVState.from_kv(torch.randn(1, 1, 400, 8), torch.randn(1, 1, 400, 8))

    def hungry(state):
        spare = [x.clone() for x in (state.keys, state.values)]
        return state.map_slots(lambda x: x.clone()) if spare else state

    assert bench_round.extra_memory(hungry, state) == pytest.approx(1.0, abs=0.2)


def test_peak_bytes_forgets_what_was_freed():
    with PeakBytes() as counter:
        for _ in range(3):
            torch.zeros(1000)
    assert counter.peak == 4000


def test_calls_take_turns():
    order = []
    seconds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2)
    assert order == ["a", "b"] * 3


def test_bench_generate_on_a_random_model(tmp_path, capsys):
    path = tmp_path / "generate.json"
    bench_generate.main(
        ["--contexts", "--random", "400", "--layers", "1", "--steps", "2", "--threads", "1", "--json", str(path)]
    )
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("| 400")
    taken = json.loads(path.read_text())["random"]["400"]
    assert set(taken) == {"full", "quarter", "full enabled", "quarter enabled"}


def test_the_small_cache_holds_a_quarter():
    model = bench_generate.random_llama(1, torch.float32, 400)
    cache = bench_generate.filled(model, bench_generate.compressed(model, "centroidkv"), 400)
    assert cache.stats().physical == 100
    assert cache.stats().logical == 400
