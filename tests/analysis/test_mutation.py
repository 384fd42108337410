from pathlib import Path

import pytest

import centroidkv
from analysis.tools.mutation import MUTATIONS

PACKAGE = Path(centroidkv.__file__).parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.old[:30]}")
def test_every_mutation_has_its_place_in_the_source(mutation):
    assert (PACKAGE / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
