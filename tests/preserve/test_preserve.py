import pytest
import torch

from centroidkv import KVState, Rotary
from centroidkv.errors import RotaryError, ShapeError, StageError
from centroidkv.preserve import Distinctive, Recent, Sinks
from centroidkv.preserve.union import Union
from centroidkv.scores import cosine_to_mean, leverage, low_norm, passages


def chosen(members, state, budget):
    return Union(tuple(members)).select(state, budget)


def test_sinks_and_recent_take_the_ends(make_state):
    mask = chosen([Sinks(2), Recent(3)], make_state(10), 8)
    assert mask[0, 0].nonzero().flatten().tolist() == [0, 1, 7, 8, 9]


def test_overlapping_preservers_never_take_a_slot_twice(make_state):
    state = make_state(5)
    mask = chosen([Sinks(4), Recent(4)], state, 5)
    assert mask.all()
    assert Union((Sinks(4), Recent(4))).count(5, 5) == 5


def test_shares_divide_what_fixed_counts_leave(make_state):
    union = Union((Distinctive(share=0.5), Sinks(4), Recent(share=0.25)))
    assert union.count(slots=100, budget=44) == 4 + 20 + 10
    mask = union.select(make_state(100), 44)
    assert mask.sum(-1).unique().tolist() == [34]
    assert mask[..., :4].all()


@pytest.mark.parametrize("score", ["leverage", "cosine", "low_norm"])
def test_distinctive_takes_the_best_scores_of_free_slots(make_state, score):
    state = make_state(40)
    stage = Distinctive(score=score, share=1.0, rope="after")
    free = torch.ones(2, 2, 40, dtype=torch.bool)
    free[:, :, ::3] = False
    mask = stage.select(state, free, 7)
    assert mask.sum(-1).unique().tolist() == [7]
    assert not (mask & ~free).any()
    scores = Distinctive.SCORES[score](state)
    worst_taken = scores.masked_fill(~mask, torch.inf).amin(-1)
    best_left = scores.masked_fill(mask | ~free, -torch.inf).amax(-1)
    assert (worst_taken >= best_left).all()


def test_ties_go_to_the_earliest_slot():
    state = KVState.from_kv(torch.ones(1, 1, 9, 4), torch.ones(1, 1, 9, 4))
    mask = Distinctive(score=low_norm, rope="after").select(state, torch.ones(1, 1, 9, dtype=torch.bool), 3)
    assert mask[0, 0].nonzero().flatten().tolist() == [0, 1, 2]


def test_leverage_is_the_hat_matrix_diagonal(make_state):
    state = make_state(50, size=6)
    x = state.keys.double() - state.keys.double().mean(2, keepdim=True)
    hat = x @ torch.linalg.pinv(x)
    assert torch.allclose(leverage(state), hat.diagonal(dim1=-2, dim2=-1).float(), atol=2e-3)


def test_leverage_weighs_a_centroid_as_its_members():
    tokens = torch.randn(1, 1, 12, 4).repeat_interleave(torch.tensor([1] * 10 + [3, 5]), dim=2)
    merged = tokens[:, :, [*range(10), 10, 13]]
    degree = torch.tensor([[[1.0] * 10 + [3, 5]]])
    state = KVState(merged, merged, degree, torch.arange(12).view(1, 1, 12))
    full = leverage(KVState.from_kv(tokens, tokens))[:, :, [*range(10), 10, 13]]
    assert torch.allclose(leverage(state), full, atol=1e-4)


def test_scores_survive_constant_and_zero_keys():
    for value in (0.0, 1.0):
        state = KVState.from_kv(torch.full((1, 1, 8, 4), value), torch.zeros(1, 1, 8, 4))
        for score in (leverage, cosine_to_mean, low_norm):
            assert torch.isfinite(score(state)).all()


def test_an_outlier_is_distinctive_wherever_it_stands():
    rotary = Rotary.from_theta(1e4, 16)
    content = torch.randn(1, 1, 1, 16) + 0.05 * torch.randn(1, 1, 60, 16)
    content[0, 0, 37] = torch.randn(16)
    positions = torch.arange(60).view(1, 1, 60)
    state = KVState.from_kv(rotary.rotate(content, positions), content, rotary=rotary)
    mask = Distinctive().select(state, torch.ones(1, 1, 60, dtype=torch.bool), 1)
    assert mask[0, 0].nonzero().flatten().tolist() == [37]


def test_unknown_rotation_is_refused():
    keys = torch.randn(1, 1, 5, 4)
    with pytest.raises(RotaryError, match="rope='after'"):
        Distinctive().select(KVState.from_kv(keys, keys), torch.ones(1, 1, 5, dtype=torch.bool), 2)


def test_a_score_of_the_wrong_shape_is_refused(make_state):
    stage = Distinctive(score=lambda state: state.keys, rope="after")
    with pytest.raises(ShapeError, match="score"):
        stage.select(make_state(5), torch.ones(2, 2, 5, dtype=torch.bool), 2)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Sinks(-1),
        lambda: Sinks(1.5),
        lambda: Recent(),
        lambda: Recent(4, share=0.5),
        lambda: Recent(share=1.5),
        lambda: Distinctive(score="novelty"),
        lambda: Distinctive(share=0.0),
        lambda: Distinctive(rope="during"),
    ],
)
def test_bad_arguments_are_refused(build):
    with pytest.raises(StageError):
        build()


def test_passages_finds_a_whole_phrase_for_every_head(make_state):
    state = make_state(200, heads=3)
    keys, values = state.keys * 0.1, state.values * 0.1
    # Each head finds another part of the phrase strange.
    for head, part in enumerate((slice(100, 103), slice(102, 105), slice(104, 107))):
        keys[:, head, part] += 3 * torch.randn(2, part.stop - part.start, 16)
        values[:, head, part] += 3 * torch.randn(2, part.stop - part.start, 8)
    state = KVState.from_kv(keys, values)
    score = passages(state)
    assert score.equal(score[:, :1].expand(score.shape))
    taken = Distinctive("passages", share=1.0, rope="after").select(state, torch.ones_like(state.live), 9)
    assert taken[..., 100:107].all()
    single = Distinctive("leverage", share=1.0, rope="after").select(state, torch.ones_like(state.live), 9)
    assert not single[..., 100:107].all()
