"""Attention that is switched in the middle of a forward pass, by another thread or a hook: right, or refused in it."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from matrix_case import Case  # noqa: E402
from matrix_models import FAMILIES, needs_shared  # noqa: E402

from centroidkv import Budget, Compressor  # noqa: E402
from centroidkv.cache import FixedState, GrowingState  # noqa: E402
from centroidkv.errors import BackendError, CacheError  # noqa: E402
from centroidkv.integrations.transformers import CentroidCache, enable  # noqa: E402
from centroidkv.preserve import Recent, Sinks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

SMALL = Compressor.builder().preserve(Sinks(1), Recent(4)).budget(Budget.tokens(12)).build()
CAPACITIES = ["growing", pytest.param("fixed", marks=needs_shared)]


def filled(case, capacity):
    """A cache that was clustered."""
    cache = CentroidCache(SMALL, interval=8, capacity=capacity)
    case.forward(case.prompt(40), cache)
    assert cache.stats().merged
    return cache


def once(monkeypatch, owner, name, act, before=False):
    """Call ``act(self)`` before or after ``owner.name`` runs next."""
    plain, acts = getattr(owner, name), [act]

    def method(self, *args, **kwargs):
        if before and acts:
            acts.pop()(self)
        result = plain(self, *args, **kwargs)
        if acts:
            acts.pop()(self)
        return result

    monkeypatch.setattr(owner, name, method)


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_leaving_while_a_layer_takes_its_tokens_is_noticed_in_that_layer(attention, capacity, monkeypatch):
    """The only layer, so nobody comes after it that could look; stock sdpa would be right or wrong by the mask."""
    case = Case(FAMILIES["llama"])
    with case.attending(attention, with_enable=False):
        handle = enable(case.model)
        cache = CentroidCache(SMALL, interval=8, capacity=capacity)
        ids, mask = case.prompt(40), torch.ones(1, 40, dtype=torch.long)
        mask[0, 5:9] = 0
        case.model(ids, attention_mask=mask, past_key_values=cache)
        state = (GrowingState, "append") if capacity == "growing" else (FixedState, "step")
        once(monkeypatch, *state, lambda _: handle.undo(), before=True)
        with pytest.raises(BackendError, match=r"would ignore the degrees.*reset\(\)"):
            case.model(case.prompt(1), attention_mask=torch.cat((mask, mask[:, :1]), 1), past_key_values=cache)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layers", [1, 2])
def test_leaving_between_the_cache_and_the_attention_is_noticed_in_that_layer(layers, attention, capacity, monkeypatch):
    """The attention function of the model is looked up after the cache was asked: it is a stock one by now."""
    case = Case(FAMILIES["llama"])
    case.model.model.layers = case.model.model.layers[:layers]
    case.model.config.num_hidden_layers = layers
    case.model.set_attn_implementation(attention)
    handle = enable(case.model)
    cache = filled(case, capacity)
    once(monkeypatch, CentroidCache, "update", lambda _: handle.undo())
    with pytest.raises(BackendError, match=r"without the degrees it was handed.*reset\(\)"):
        case.forward(case.prompt(1), cache)
    assert case.model.config._attn_implementation == attention
    assert not hooks(case.model)
    if layers == 2:  # the other one never saw the token
        with enable(case.model), pytest.raises(CacheError, match=r"reset\(\)"):
            case.forward(case.prompt(1), cache)


def test_hooks_go_with_the_last_user_also_while_another_model_computes(monkeypatch):
    """Their hooks stay until the other's handover is signed for, and are gone then."""
    one, two = Case(FAMILIES["llama"]), Case(FAMILIES["qwen2"])
    handle = enable(one.model)
    with two.attending("sdpa"):
        cache = filled(two, "growing")
        once(monkeypatch, CentroidCache, "update", lambda _: handle.undo())
        wanted = filled(two, "growing")
        assert not hooks(one.model)
        two.same(two.forward(two.prompt(1), cache), two.forward(two.prompt(1), wanted))
    assert not hooks(two.model)


def test_hooks_do_not_pile_up_while_the_handover_of_a_stopped_pass_is_kept(monkeypatch):
    case = Case(FAMILIES["llama"])
    with case.attending("sdpa"):
        once_on = hooks(case.model)
        cache = filled(case, "growing")
        once(monkeypatch, CentroidCache, "update", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            case.forward(case.prompt(1), cache)
    for _ in range(3):
        with enable(case.model):
            assert hooks(case.model) == once_on
    cache.reset()
    with enable(case.model):
        pass
    assert not hooks(case.model)


def test_a_refused_handover_keeps_no_hooks():
    case = Case(FAMILIES["llama"])
    with case.attending("sdpa"):
        cache = filled(case, "growing")
        with pytest.raises(BackendError, match="bias"):
            case.forward(case.prompt(1), cache, position_bias=torch.zeros(1, 4, 1, 1))
    assert not hooks(case.model)


def test_a_copy_of_an_enabled_model_is_given_back_whole():
    """It comes with its original's hooks, which nobody would take off."""
    case = Case(FAMILIES["llama"])
    with case.attending("sdpa"):
        once_on = hooks(case.model)
        case.model, original = copy.deepcopy(case.model), case.model
        with enable(case.model):
            assert hooks(case.model) == once_on
            case.forward(case.prompt(1), filled(case, "growing"))
        assert not hooks(case.model)
        assert hooks(original) == once_on
        case.model(case.prompt(3))
        case.model = original


def test_a_hook_that_is_taken_off_while_others_run_does_no_harm():
    """PyTorch asks for every hook of a module just before it runs whether keyword arguments go to it."""
    case = Case(FAMILIES["llama"])
    with case.attending("sdpa", with_enable=False):
        first = [module.register_forward_hook(lambda *_: handle.undo()) for module in case.model.modules()]
        handle = enable(case.model)
        case.model(case.prompt(3))
        assert not hooks(case.model) - len(first)


@needs_shared
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_fixed_cache_asks_the_model_that_runs(layers, compiled):
    """Another one than the one that filled it, with the same weights and other attention."""
    case = Case(FAMILIES["llama"])
    case.model.model.layers = case.model.model.layers[:layers]
    case.model.config.num_hidden_layers = layers
    first = case.model
    with enable(first):
        wanted = case.forward(case.prompt(1), filled(case, "growing"))
        for attention in ("eager", "sdpa"):
            cache = filled(case, "fixed")
            second = copy.deepcopy(first)
            second.set_attn_implementation(attention)
            if compiled:
                torch._dynamo.reset()
                second.compile(backend="eager")
            case.model = second
            if attention == "sdpa":
                case.same(case.forward(case.prompt(1), cache), wanted)
            else:
                with pytest.raises(BackendError, match="'eager': call enable"):
                    case.forward(case.prompt(1), cache)
            case.model = first


@needs_shared
def test_assisted_generation_with_a_fixed_capacity_says_why_there_is_no_room():
    case = Case(FAMILIES["llama"])
    with case.attending("sdpa"), pytest.raises(CacheError, match=r"crop that assisted.*capacity='growing'"):
        case.generate(
            case.prompt(40), CentroidCache(SMALL, 8, capacity="fixed"), assistant_model=Case(FAMILIES["llama"]).model
        )


@needs_shared
@pytest.mark.parametrize("capacity", ["growing", "fixed"])
def test_choosing_a_deaf_attention_while_the_only_layer_takes_its_tokens_says_reset(capacity, monkeypatch):
    case = Case(FAMILIES["llama"])
    case.model.model.layers = case.model.model.layers[:1]
    case.model.config.num_hidden_layers = 1
    with case.attending("sdpa", with_enable=False):
        cache = filled(case, capacity)
        state = (GrowingState, "append") if capacity == "growing" else (FixedState, "step")
        once(monkeypatch, *state, lambda _: case.model.set_attn_implementation("eager"))
        with pytest.raises(BackendError, match=r"switched from 'sdpa' to 'eager'.*reset\(\)"):
            case.forward(case.prompt(1), cache)


@needs_shared
@pytest.mark.parametrize("capacity", ["growing", "fixed"])
def test_entering_while_a_layer_takes_its_tokens_changes_nothing(capacity, monkeypatch):
    case = Case(FAMILIES["llama"])
    with case.attending("sdpa", with_enable=False):
        wanted = case.forward(case.prompt(1), filled(case, capacity))
        cache, handles = filled(case, capacity), []
        state = (GrowingState, "append") if capacity == "growing" else (FixedState, "step")
        once(monkeypatch, *state, lambda _: handles.append(enable(case.model)))
        case.same(case.forward(case.prompt(1), cache), wanted)
        handles[0].undo()


@needs_shared
def test_leaving_between_two_layers_of_a_fixed_step_says_that_a_reset_is_due():
    case = Case(FAMILIES["llama"])
    case.model.set_attn_implementation("eager")
    handle = enable(case.model)
    cache = filled(case, "fixed")
    hook = case.model.model.layers[1].register_forward_pre_hook(lambda *_: handle.undo())
    with pytest.raises(BackendError, match=r"'eager': call enable.*reset\(\)"):
        case.forward(case.prompt(1), cache)
    hook.remove()


@needs_shared
@pytest.mark.parametrize("compiled", [False, True])
def test_a_fixed_step_that_stopped_between_two_layers_is_noticed_by_the_next(compiled):
    """Also where every layer is a graph of its own, which no Python between them looks at."""
    case = Case(FAMILIES["llama"])
    with case.attending("sdpa"):
        cache = filled(case, "fixed")
        if compiled:
            for layer in case.model.model.layers:
                layer.compile(backend="eager")
            case.forward(case.prompt(1), cache)
        second = case.model.model.layers[1]
        hook = second.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            case.forward(case.prompt(1), cache)
        hook.remove()
        for _ in range(2):
            with pytest.raises((CacheError, RuntimeError), match=r"different numbers of tokens.*reset\(\)"):
                case.forward(case.prompt(1), cache)
