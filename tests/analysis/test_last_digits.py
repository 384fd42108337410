"""What rounding errors of the keys change."""

import torch

from analysis.evaluation.fidelity.prefill import prefill
from analysis.evaluation.last_digits import compressors, states_of, trial
from tests.analysis.conftest import make_llama


def example():
    torch.manual_seed(0)
    model = make_llama()
    return model, prefill(model, torch.randint(3, 98, (1, 400))), torch.randint(3, 98, (1, 20))


def test_without_noise_nothing_changes_and_with_much_nearly_all_heads_do():
    model, filled, tail = example()
    compressor = compressors(["quick"], 0.5)["quick"]
    (still,) = trial(model, filled, tail, compressor, 0.0, range(1, 2))
    assert (still.heads, still.of, still.largest) == (0, 4, 0.0)
    first, second = trial(model, filled, tail, compressor, 0.1, range(1, 3))
    assert first.heads == second.heads == 4
    assert first.largest > 1e-4
    assert first.largest != second.largest


def test_noise_is_a_share_of_every_key_and_follows_the_seed():
    _, filled, _ = example()
    compressor = compressors(["streaming_llm"], 0.5)["streaming_llm"]
    plain, one, again, other = (
        states_of(filled, compressor, *how)[0].keys for how in ((0, 0), (1e-3, 1), (1e-3, 1), (1e-3, 2))
    )
    assert one.equal(again)
    assert not one.equal(other)
    assert 0.5e-3 < float((one / plain - 1).std()) < 2e-3


def test_every_preset_is_measured_as_it_is_and_as_it_is_served():
    methods = compressors(["quick", "distinctive"], 0.25)
    assert list(methods) == ["quick", "quick, served", "distinctive", "distinctive, served"]
    assert methods["quick"].similarity.step is None
    assert methods["quick, served"].similarity.step
