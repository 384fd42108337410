"""Models x situations, on the installed transformers: each cell passes, is refused with a reason, or is not there.

The table is printed at the end of the run (tests/conftest.py); `make compat` prints it for several releases.
"""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from matrix_case import Case, NotHere, Refused  # noqa: E402
from matrix_models import FAMILIES, REFUSED  # noqa: E402
from matrix_situations import SITUATIONS  # noqa: E402

from centroidkv.errors import CentroidKVError  # noqa: E402
from centroidkv.integrations.transformers import CentroidCache, enable  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::centroidkv.errors.BudgetNotMetWarning"),  # all layers slide: tested beside
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
@pytest.mark.parametrize("model", FAMILIES)
def test_cell(model, situation, record_property):
    record_property("column", model)
    record_property("row", situation.__name__)
    try:
        situation(Case(FAMILIES[model]))
    except Refused as refusal:
        record_property("refused", str(refusal))
    except NotHere as absence:
        pytest.skip(str(absence))


@pytest.mark.parametrize("model", REFUSED)
@pytest.mark.parametrize("with_enable", [True, False], ids=["enabled", "cache alone"])
def test_models_that_cannot_be_compressed_are_refused_before_the_first_token(model, with_enable, record_property):
    make, reason = REFUSED[model]
    case = Case.__new__(Case)
    case.model = make()
    cache = CentroidCache(case.compressor())
    attempt = (lambda: enable(case.model)) if with_enable else (lambda: case.generate(case.prompt(40), cache))
    with pytest.raises((CentroidKVError, ValueError), match=f"(?i){reason}") as refusal:
        attempt()
    assert not cache.stats().logical
    assert not str(case.model.config._attn_implementation).startswith("centroidkv")
    record_property("refused model", f"{model}: {refusal.type.__name__}: {refusal.value}")
