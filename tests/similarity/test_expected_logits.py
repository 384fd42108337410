from dataclasses import replace

import pytest
import torch

from centroidkv.errors import StageError
from centroidkv.queries import mean_moment
from centroidkv.similarity import ExpectedLogits


def points(state, stage):
    ready = stage.prepare(state, torch.ones_like(state.live))
    return stage.features(ready)


def test_scores_are_the_expected_squared_difference_of_logits_and_values(make_state):
    state = make_state(12, queries=True)
    stage = ExpectedLogits(values=0.5, ridge=0.2)
    found = points(state, stage)
    scores = stage(found[:, :, :5], found[:, :, 5:])
    moment = mean_moment(state, None)
    level = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    metric = 0.8 * moment + 0.2 * level * torch.eye(16)
    step = state.keys[:, :, :5, None] - state.keys[:, :, None, 5:]
    logits = torch.einsum("bhijd,bhde,bhije->bhij", step, metric, step)
    values = (state.values[:, :, :5, None] - state.values[:, :, None, 5:]).square().sum(-1)
    power = state.values.square().sum(-1).mean(-1)[..., None, None]
    assert torch.allclose(scores, -(logits + 0.5 * values / power), rtol=1e-3, atol=1e-3)


def test_differences_that_no_query_sees_hardly_count(make_state):
    state = make_state(2, queries=True)
    direction = torch.zeros(16)
    direction[7] = 1.0  # the slowest pair is channels 7 and 15
    queries = torch.zeros(2, 2, 12, 16)
    queries[..., 7] = 3.0
    state = replace(state, head_data={"queries": queries}, values=torch.ones_like(state.values))
    apart = torch.zeros(2, 2, 2, 16)
    apart[:, :, 1, 7] = 1.0
    stage = ExpectedLogits(values=0.0, ridge=0.01)
    seen = points(replace(state, keys=apart), stage)
    unseen = points(replace(state, keys=apart.roll(-4, -1)), stage)  # the same step in a channel no query looks at
    score = [float(stage(x[:, :, :1], x[:, :, 1:]).max()) for x in (seen, unseen)]
    assert score[0] < 50 * score[1] < 0


@pytest.mark.parametrize("options", [{"values": -1.0}, {"ridge": 0.0}, {"ridge": 1.5}])
def test_bad_options_are_refused(options):
    with pytest.raises(StageError, match="ridge"):
        ExpectedLogits(**options)
