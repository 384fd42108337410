"""Planted faults of similarity: plausible wrong implementations, under the law that must reject them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch.nn.functional import normalize

from centroidkv.similarity import Cosine, Dot, NegativeEuclidean
from centroidkv.testing import prepare_laws, similarity_laws


def normalised_by_mean(a, b):
    scores = a @ b.mT
    return scores - scores.mean((-1, -2), keepdim=True)


def channels_up_to(most):
    return lambda a, b: Cosine()(a[..., :most], b[..., :most])


def absolute(a, b):
    return (normalize(a, dim=-1) @ normalize(b, dim=-1).mT).abs()


def squared(a, b):
    return Cosine()(a, b).square()


def rows_mixed(a, b):
    """Every row and head is compared with the mean direction of all taken out."""
    shape = tuple(range(a.ndim - 1))
    both = torch.cat((a.flatten(0, -2), b.flatten(0, -2))).mean(0) if len(shape) else 0
    return -torch.cdist(a.double() - both, b.double() + both).to(a.dtype)


def one_head_for_all(a, b):
    if a.ndim < 4:
        return Cosine()(a, b)
    return Cosine()(a[:, :1], b[:, :1]).expand(*a.shape[:-1], b.shape[-2]).contiguous()


def four_axes_only(a, b):
    if a.ndim != 4:
        raise ValueError(a.shape)
    return Cosine()(a, b)


def tile_of_64(a, b):
    """Scores of the 65th vector and later ones are those of the 64th."""
    index = torch.arange(b.shape[-2]).clamp(max=63)
    return Cosine()(a, b)[..., index]


class Cached:
    """Keeps the unit vectors of the last call, and takes them for equal shapes."""

    def __init__(self):
        self.shape, self.units = None, None

    def __call__(self, a, b):
        if self.shape != b.shape:
            self.shape, self.units = b.shape, normalize(b.double(), dim=-1)
        return (normalize(a.double(), dim=-1) @ self.units.mT).to(a.dtype)


def normalised_in_place(a, b):
    a.div_(a.norm(dim=-1, keepdim=True).clamp(min=1e-12))
    return a @ normalize(b, dim=-1).mT


class Featured(NegativeEuclidean):
    """Distances of points made by a function."""

    def __init__(self, points, prepare=None, **declared):
        object.__setattr__(self, "points", points)
        if prepare is not None:
            object.__setattr__(self, "prepare", prepare)
        for name, value in declared.items():
            object.__setattr__(self, name, value)

    def features(self, state):
        return self.points(state)


def declares(**attributes):
    similarity = Featured(None)
    for name, value in attributes.items():
        object.__setattr__(similarity, name, value)
    return similarity


def count_calls():
    calls = itertools.count()

    def prepare(state, free):
        return replace(
            state, head_data={**state.head_data, "calls": torch.full(state.keys.shape[:2], float(next(calls)))}
        )

    return prepare


def add(state, free, **data):
    return replace(state, head_data={**state.head_data, **data})


def doubled_again(state, free):
    before = state.head_data.get("scale", torch.ones(state.keys.shape[:2]))
    return add(state, free, scale=before * 2)


def renormalised(state, free):
    return replace(state, keys=normalize(state.keys.float(), dim=-1).to(state.keys.dtype))


def forgets_slot_data(state, free):
    return replace(state, slot_data={"norm": state.keys.float().norm(dim=-1)})


def fills_free(state, free):
    free.fill_(True)
    return state


def grows(state, free):
    """Adds another entry every time."""
    return add(state, free, **{f"again {len(state.head_data)}": torch.ones(state.keys.shape[:2])})


def remembers_scale():
    largest = [0.0]

    def prepare(state, free):
        largest[0] = max(largest[0], float(state.values.float().abs().max()))
        return add(state, free, scale=torch.full(state.keys.shape[:2], largest[0]))

    return prepare


PREPARING = {
    prepare_laws.prepare_only_adds: {
        "normalises the keys": Featured(None, renormalised),
        "forgets other slot data": Featured(None, forgets_slot_data),
        "writes to the free mask": Featured(None, fills_free),
    },
    prepare_laws.prepare_is_idempotent: {
        "doubles what it finds": Featured(None, doubled_again),
        "one more entry every time": Featured(None, grows),
    },
    prepare_laws.prepare_remembers_nothing: {
        "counts its calls": Featured(None, count_calls()),
        "the largest value ever": Featured(None, remembers_scale()),
    },
}

SIMILARITY = PREPARING | {
    similarity_laws.scores_are_finite: {
        "divides by zero norms": lambda a, b: (a / a.norm(dim=-1, keepdim=True)) @ (b / b.norm(dim=-1, keepdim=True)).mT,
        "squares overflow": lambda a, b: ((a**4).sum(-1, keepdim=True) * (b**4).sum(-1)[..., None, :]).log(),
        "transposed": lambda a, b: Cosine()(b, a),
        "rows and heads only": four_axes_only,
    },
    similarity_laws.is_symmetric: {
        "normalises one side": lambda a, b: (a / (a.norm(dim=-1, keepdim=True) + 1)) @ b.mT,
        "adds the column's norm": lambda a, b: Cosine()(a, b) + b.norm(dim=-1)[..., None, :].clamp(max=1),
    },
    similarity_laws.pairs_are_scored_alone: {
        "centred over the batch": normalised_by_mean,
        "softmax over the row": lambda a, b: Cosine()(a, b).softmax(-1),
        "the first head's for all": one_head_for_all,
        "centred over rows and heads": rows_mixed,
        "a tile of 64 columns left in": tile_of_64,
    },
    similarity_laws.every_channel_counts: {
        "all but the last channel": lambda a, b: Cosine()(a[..., :-1], b[..., :-1]) if a.shape[-1] > 1 else Cosine()(a, b),
        "at most 64 channels": channels_up_to(64),
        "at most 256 channels": channels_up_to(256),
    },
    similarity_laws.remembers_nothing: {
        "unit vectors of the last call": Cached(),
        "normalised in place": normalised_in_place,
        "noise": lambda a, b: Cosine()(a, b) + 1e-3 * torch.rand(()),
    },
    similarity_laws.declares_what_exists: {
        "rope where nobody knows it": declares(rope="never"),
        "heads where nobody knows them": declares(heads="max"),
        "rope misspelt": declares(rope="befor"),
        "a need misspelt": declares(need_queries=True),
        "features and a way to see keys": declares(features=lambda s: s.keys.float(), rope="before"),
    },
    similarity_laws.features_are_points: {
        "heads averaged without saying so": Featured(lambda s: s.keys.float().mean(1, keepdim=True).expand(s.keys.shape)),
        "rows centred together": Featured(lambda s: s.keys.float() - s.keys.float().mean(0, keepdim=True)),
        "un-rotated without saying so": Featured(lambda s: s.keys_before_rope("features")),
        "queries without saying so": Featured(lambda s: s.keys.float() @ s.head_data["queries"].float().mT),
        "head 64 for all that follow": Featured(lambda s: s.keys.float()[:, torch.arange(s.heads).clamp(max=63)]),
    },
    similarity_laws.a_copy_is_most_similar: {
        "dot": Dot(),
        "the absolute cosine of unit vectors": lambda a, b: Cosine()(a, b).abs() + 0 * a[..., :1],
        "squared cosine of the first channel": lambda a, b: a[..., :1] @ b[..., :1].mT,
    },
    similarity_laws.ignores_scale: {
        "dot": Dot(),
        "distance": NegativeEuclidean(),
    },
    similarity_laws.prefers_the_same_direction: {
        "distance with the sign wrong": lambda a, b: torch.cdist(a, b),
        "negated cosine": lambda a, b: -Cosine()(a, b),
        "the absolute cosine": absolute,
        "the squared cosine": squared,
    },
}  # fmt: skip
