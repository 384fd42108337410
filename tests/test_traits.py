"""What stages say of themselves is read in one place, and refused where nobody would read it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import centroidkv
from centroidkv import Compressor, presets
from centroidkv.allocation import MiddleLayers
from centroidkv.errors import BackendError, BudgetError, StageError
from centroidkv.matching import BipartiteSoftMatching, Evict
from centroidkv.preserve import Recent, Sinks
from centroidkv.similarity import Cosine
from centroidkv.traits import LookingTraits, MatcherTraits, SimilarityTraits, own


def saying(kind, **attributes):
    """A stage of that class with more attributes."""
    stage = type(kind.__name__, (kind,), attributes)
    return stage()


def featured(**attributes):
    similarity = Cosine(**attributes)
    object.__setattr__(similarity, "features", lambda state: state.keys)
    return similarity


@pytest.mark.parametrize(
    ("part", "stage", "told"),
    [
        ("matching", saying(BipartiteSoftMatching, need_partition=False), "'needs_partition'"),
        ("matching", saying(BipartiteSoftMatching, evict=True), "'evicts'"),
        ("matching", saying(BipartiteSoftMatching, exact="no"), "exact is True or False, got 'no'"),
        ("matching", saying(BipartiteSoftMatching, mass=3), "mass is the name of slot data"),
        ("matching", saying(BipartiteSoftMatching, capacity=3), "capacity is a method"),
        ("similarity", saying(Cosine, pool_heads=True), "'pools_heads'"),
        ("similarity", saying(Cosine, prepares=lambda *_: None), "'prepare'"),
        ("similarity", featured(heads="mean"), "would change nothing"),
        ("preserve", saying(Sinks, need_queries=True), "'needs_queries'"),
        ("allocation", saying(MiddleLayers, even="yes"), "even is True or False"),
    ],
)
def test_what_nobody_reads_is_refused_with_the_right_word(part, stage, told):
    with pytest.raises(StageError, match=told):
        getattr(Compressor.builder(), part)(stage).build()
    with pytest.raises(StageError, match=told):
        presets.centroidkv().with_(**{part: stage})


@pytest.mark.parametrize(("name", "value"), [("rope", "befor"), ("heads", "means")])
def test_words_that_do_not_exist_are_refused(name, value):
    @dataclass
    class Mine:
        rope: str = "after"
        heads: str = "each"

        def __call__(self, a, b):
            return a @ b.mT

    with pytest.raises(StageError, match=f"{name} is one of .*got '{value}'"):
        Compressor.builder().similarity(replace(Mine(), **{name: value})).build()


def test_right_but_unusual_stages_pass():
    class Mine:
        needs_queries = np.bool_(False)
        heads_seen, weight, steps, ranked, exponent = 3, 0.5, 7, True, 2  # near nothing, or near a common word

        def __call__(self, a, b):
            return a @ b.mT

    Compressor.builder().similarity(Mine()).build()
    Compressor.builder().similarity(lambda a, b: a @ b.mT).build()


def test_defaults_are_given_for_what_is_not_said():
    assert MatcherTraits.of(lambda: 0) == MatcherTraits()
    assert SimilarityTraits.of(Cosine(heads="mean")).heads == "mean"
    assert LookingTraits.of(Cosine()).prepare is None


def test_what_vouches_for_a_classs_code_is_not_inherited():
    assert own(Cosine(), "formula") == "cosine"
    assert own(type("Mine", (Cosine,), {})(), "formula") is None


FILES = sorted(Path(centroidkv.__file__).parent.rglob("*.py"))


def test_no_other_file_asks_stages_for_attributes():
    """By the names of traits, with a default: that is what traits.py is for."""
    traits = {name for kind in (MatcherTraits, SimilarityTraits, LookingTraits) for name in kind.__dataclass_fields__}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name == "traits.py" or not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
                assert node.args[1].value not in traits | {"even"}, f"{path}:{node.lineno}"


# -- a compressor checks itself, however it was made -----------------------------------------------------------------


def test_every_door_to_a_compressor_is_locked():
    good = presets.centroidkv(0.25)
    for change, error in (
        ({"backend": "natve"}, BackendError),
        ({"backend": ["auto"]}, BackendError),
        ({"matching": BipartiteSoftMatching}, StageError),
        ({"similarity": 3}, StageError),
        ({"budget": 5}, BudgetError),  # sinks and recent slots need more
        ({"budget": -1.0}, BudgetError),
    ):
        with pytest.raises(error):
            good.with_(**change)
        with pytest.raises(error):
            replace(good, **change)
    with pytest.raises(StageError, match=r"no part 'matcher'; its parts are \('preserve', 'partition'"):
        good.with_(matcher=Evict())
    with pytest.raises(StageError, match="got the class Sinks"):
        replace(good, preservers=(Sinks,))


def test_with_changes_one_part_and_nothing_else():
    good = presets.balanced(0.25)
    other = good.with_(budget=0.5, preserve=(Sinks(2), Recent(8)))
    assert repr(other.preservers.members) == "(Sinks(slots=2), Recent(slots=8, share=None))"
    assert other.with_(budget=0.25, preserve=good.preservers) == good
    assert good.with_(preserve=Sinks(2)).preservers.members == (Sinks(2),)


def test_what_ran_and_why_not_the_others_is_said(make_state):
    tome = presets.tome()
    assert tome.runs_on("cpu") == "reference"
    assert list(tome.why_not("cpu")) == ["blocked", "triton"]
    assert "inside chunks of a fixed size" in tome.why_not("cpu")["blocked"]
    ours = presets.centroidkv()
    assert (ours.runs_on("cpu"), ours.why_not("cpu")) == ("blocked", {})
    assert "is for the CPU" in ours.why_not("cuda")["blocked"]
    assert ours.with_(backend="reference").why_not("cpu") == {}
    wide = make_state(5, size=16, dtype=torch.float64)
    fastest = ours.with_(backend="fastest")
    assert fastest.runs_on(wide) == "blocked"
    assert "native" in fastest.why_not(wide)
