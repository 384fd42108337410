"""Ablations are the default preset but for what their name says."""

from analysis.evaluation.fidelity.ablations import ABLATIONS, COMPARED, PASSAGES, with_parts
from analysis.evaluation.fidelity.contenders import all_contenders
from centroidkv import Budget, presets


def test_without_a_change_it_is_the_default_preset():
    assert with_parts(PASSAGES)(Budget.tokens(400)) == presets.balanced(Budget.tokens(400))


def test_each_differs_from_it_and_all_can_be_measured():
    built = [make(Budget.tokens(400)) for make in ABLATIONS.values()]
    assert all(compressor != presets.balanced(Budget.tokens(400)) for compressor in built)
    assert len({repr(compressor) for compressor in built}) == len(built)
    assert set(COMPARED) <= {contender.name for contender in all_contenders()}
