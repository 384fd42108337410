"""Faults found with the matrix, one test each, that do not need all of it."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from matrix_case import Case  # noqa: E402
from matrix_models import FAMILIES, RELEASE  # noqa: E402

from centroidkv.errors import BackendError, BudgetNotMetWarning, CacheError  # noqa: E402
from centroidkv.integrations.transformers import enable  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


def lose(*_):
    raise ArithmeticError("lost")


def stop_at_layer_1(case, cache, tokens):
    """A forward pass of so many tokens that only layer 0 takes."""
    hook = case.model.model.layers[1].register_forward_pre_hook(lose)
    with pytest.raises(ArithmeticError):
        case.forward(case.prompt(tokens), cache)
    hook.remove()


@pytest.mark.parametrize("before", [0, 20], ids=["first pass", "later pass"])
def test_a_pass_that_stopped_after_a_sliding_layer_is_noticed(before):
    """The compressed layers are all in step: only the window ahead of them has moved on."""
    case = Case(FAMILIES["gemma3"])
    with case.attending("sdpa"):
        cache = case.cache()
        if before:
            case.forward(case.prompt(before), cache)
        stop_at_layer_1(case, cache, tokens=9)
        with pytest.raises(CacheError, match=r"reset\(\)"):
            case.forward(case.prompt(9), cache)


def test_a_pass_that_stopped_between_two_sliding_layers_is_noticed():
    """No layer is compressed: nobody but the first window can look."""
    case = Case(FAMILIES["mistral-sliding"])
    with case.attending("sdpa"):
        with pytest.warns(BudgetNotMetWarning):
            case.forward(case.prompt(20), cache := case.cache())
        stop_at_layer_1(case, cache, tokens=3)
        with pytest.raises(CacheError, match=r"reset\(\)"):
            case.forward(case.prompt(1), cache)


def test_a_refusal_in_the_middle_of_a_pass_says_that_a_reset_is_due():
    """Another thread leaves ``enable`` while this one is between two layers."""
    case = Case(FAMILIES["llama"])
    with case.attending("eager", with_enable=False):
        cache, handle = case.cache(), enable(case.model)
        hook = case.model.model.layers[1].register_forward_pre_hook(lambda *_: handle.undo())
        with pytest.raises(BackendError, match=r"would ignore the degrees.*reset\(\)"):
            case.forward(case.prompt(9), cache)
        hook.remove()
        with pytest.raises(BackendError, match="would ignore the degrees"):  # of an empty one it need not be said
            case.forward(case.prompt(9), fresh := case.cache())
        assert not fresh.get_seq_length()


def test_a_crop_by_a_tensor_leaves_whole_numbers():
    """Assisted generation crops by one, and a layer that goes on counting with it is equal to no other."""
    case = Case(FAMILIES["gemma3"])
    with case.attending("sdpa"):
        case.forward(case.prompt(9), cache := case.cache(1.0))
        cache.crop(torch.tensor(-2))
        assert [type(layer.get_seq_length()) for layer in cache.layers] == [int] * 3
        case.forward(case.prompt(2), cache)


def test_a_model_of_sliding_windows_alone_is_served_with_a_warning():
    case = Case(FAMILIES["mistral-sliding"])
    with case.attending("sdpa"), pytest.warns(BudgetNotMetWarning, match="compresses nothing"):
        case.generate(case.prompt(40), case.cache())


def test_a_refused_crop_leaves_all_layers_as_they_were():
    case = Case(FAMILIES["gemma3"])
    with case.attending("sdpa"):
        case.forward(case.prompt(28), cache := case.cache())
        lengths = [layer.get_seq_length() for layer in cache.layers]
        with pytest.raises(CacheError, match="cannot be separated"):  # windows could, not yet full
            cache.crop(-3)
        assert [layer.get_seq_length() for layer in cache.layers] == lengths


def test_waiting_for_crops_ends_with_the_crops():
    """After assisted generation a plain one compresses again, though nobody says that recording is over."""
    case = Case(FAMILIES["llama"])
    ids = case.prompt(48)
    with case.attending("sdpa"):
        case.forward(ids, cache := case.cache())
        cache.activate_past_recording()
        assert cache.is_croppable
        case.generate(torch.cat((ids, ids[:, :1]), -1), cache, new=12)
        assert not cache.is_croppable
    assert cache.stats().physical <= 0.25 * 60 + 2 * 4


@pytest.mark.skipif(RELEASE < (5, 17), reason="earlier windows keep nothing to take back, and refuse by themselves")
def test_cropping_a_window_by_more_than_it_kept_is_refused():
    """Transformers' own windows would be left too short, and fail in the next pass without a word of why."""
    case = Case(FAMILIES["gemma3"])
    with case.attending("sdpa"):
        case.forward(case.prompt(60), cache := case.cache(1.0))
        cache.activate_past_recording()
        case.forward(case.prompt(1), cache)
        cache.crop(-1)
        lengths = [layer.get_seq_length() for layer in cache.layers]
        with pytest.raises(CacheError, match=r"a sliding window of .* holds"):
            cache.crop(-1)
        assert [layer.get_seq_length() for layer in cache.layers] == lengths
        case.forward(case.prompt(2), cache)
