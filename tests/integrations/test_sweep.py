"""Every causal family of transformers: right, left alone, or refused with a reason (docs/families.md)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from matrix_models import RELEASE  # noqa: E402

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "families.md").read_text()
MEASURED = tuple(map(int, re.search(r"Measured with transformers\s+(\d+)\.(\d+)", TEXT).groups()))
if RELEASE != MEASURED:
    pytest.skip("docs/families.md was measured with another transformers", allow_module_level=True)

import sweep_run  # noqa: E402
from sweep_families import Family, families  # noqa: E402
from sweep_oracle import placed  # noqa: E402
from sweep_run import COMPRESSORS, HEARD, cell, one_merge, plain  # noqa: E402
from sweep_table import CELLS, Reasons, page, reasons_of, rows_of, spelled  # noqa: E402

import centroidkv  # noqa: E402
from centroidkv import errors  # noqa: E402
from centroidkv.integrations.transformers import CentroidCache  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of models that are made without their usual parts

SOME = {
    "llama": "grouped queries, all routes",
    "gemma3_text": "sliding windows beside full attention",
    "mistral/windows": "windows alone",
    "qwen2_moe": "experts",
    "gpt_neox": "an update that hands nothing on",
    "jetmoe": "heads tiled after the cache",
    "diffllama": "values regrouped after the cache",
    "doge": "a mask with content",
    "bert/both ways": "not causal",
    "dory/last loop": "layers read behind the cache's back",
    "bloom": "alibi, attention of its own",
    "falcon": "a class chosen by the attention's name",
    "deepseek_v3": "latent attention",
    "qwen3_next": "linear attention",
    "qwen4_exp_text": "an index, and layers asked for before they are there",
    "xlstm": "no attention",
    "minimax": "a cache of its own",
    "openai-gpt": "no cache",
}
PAIRED = {Family("bart", "pair"), Family("bart", "bare"), Family("t5", "pair"), Family("canary", "bare")}
CHOSEN = [Family(name) for name in SOME] + sorted(PAIRED, key=str)


def told(cells: list[str], reasons: dict[int, str]) -> list[str]:
    """Cells with their reasons written out."""
    return [re.sub(r"\[(\d+)\]", lambda found: reasons[int(found[1])], text) for text in cells]


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def check(family: Family) -> None:
    """Run a family's cells: none may fail, and the page must say what became of them."""
    reasons, cells = Reasons(), []
    for attention, enabled in CELLS:
        outcomes = [cell(family, attention, enabled, name) for name in COMPRESSORS]
        assert all(outcome.fine for outcome in outcomes), (attention, enabled, outcomes)
        cells.append(spelled(outcomes, reasons))
    fresh = told(cells, dict(enumerate(reasons.known, 1)))
    assert fresh == told(rows_of(TEXT)[family], reasons_of(TEXT)), "docs/families.md is not of this code"


def test_the_page_has_a_row_for_every_family_and_no_other():
    assert list(rows_of(TEXT)) == families()
    assert len({family.model_type for family in families()}) > 190


def test_the_page_knows_three_outcomes_and_every_reason_is_ours():
    reasons = reasons_of(TEXT)
    source = [ast.parse(path.read_text()) for path in Path(centroidkv.__file__).parent.rglob("*.py")]
    strings = {
        node.value.strip()
        for tree in source
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.strip()) > 20
    }
    classes = {cls.__name__ for cls in subclasses(errors.CentroidKVError)}
    used: set[int] = set()
    for family, cells in rows_of(TEXT).items():
        for text in cells:
            for outcome in re.sub(r"\b(per head|pooled): ", "", text).split("; "):
                found = re.fullmatch(
                    r"(right|left alone|-|(?:right for single tokens|refused|not run here) \[(\d+)\])", outcome
                )
                assert found, (family, text)
                if found[2]:
                    used.add(int(found[2]))
                if outcome.startswith(("right for", "refused")):
                    kind, _, message = reasons[int(found[2])].partition(": ")
                    ours = kind in classes and any(string in message for string in strings)
                    assert ours or kind == "by the model itself", (family, reasons[int(found[2])])
    assert used == set(reasons)


@pytest.mark.parametrize("family", CHOSEN, ids=lambda family: f"{family.name} ({family.how})")
def test_a_family_of_every_kind(family):
    check(family)


@pytest.mark.sweep
@pytest.mark.parametrize("family", families(), ids=lambda family: f"{family.name} ({family.how})")
def test_every_family(family):
    check(family)


@pytest.mark.parametrize("enabled", [True, False], ids=["enable", "cache alone"])
def test_lost_degrees_and_positions_do_not_pass(enabled, monkeypatch):
    family, right = Family("llama"), sweep_run.placed
    assert cell(family, "sdpa", enabled, "per head").kind == "right"

    def losing(before, cache):
        oracle = right(before, cache)
        for layer in cache.layers:
            layer.growing.state.degree.fill_(1.0)
        return oracle

    monkeypatch.setattr(sweep_run, "placed", losing)
    assert cell(family, "sdpa", enabled, "per head").kind == "wrong"
    monkeypatch.undo()
    step = sweep_run.Text.step

    def late(text, cache, index):
        """Our cache's steps one position later than the oracle's."""
        if not isinstance(cache, CentroidCache):
            return step(text, cache, index)
        rotary = text.model.model.rotary_emb

        def shift(module, args, kwargs):
            return args, kwargs | {"position_ids": kwargs["position_ids"] + 1}

        shifted = rotary.register_forward_pre_hook(shift, with_kwargs=True)
        try:
            return step(text, cache, index)
        finally:
            shifted.remove()

    monkeypatch.setattr(sweep_run.Text, "step", late)
    assert cell(family, "sdpa", enabled, "per head").kind == "wrong"


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_one_merge_hardly_moves_the_answer_to_which_cells_are_held(name):
    stock, own = plain(Family(name), "sdpa"), CentroidCache(one_merge(), interval=1000)
    stock.text.prompt(own)
    assert 0 < own.stats().merged <= 4
    oracle = placed(stock.after, own)
    assert sweep_run.distance(stock.text.step(oracle, 0), stock.steps[0]) < 20 * HEARD


def test_the_page_can_be_written_from_any_outcomes():
    outcome = cell(Family("llama"), "eager", False, "per head")
    text = page({(Family("llama"), *place): [outcome, outcome] for place in CELLS}, "0.0")
    assert told(rows_of(text)[Family("llama")], reasons_of(text))[0].startswith("refused BackendError: ")
