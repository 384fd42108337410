"""Models that engines serve."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """Folder of a small random Llama."""
    from tests.vllm_plugin.engines import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="class")
def engine(request, smollm2):
    """SmolLM2 served as the test class's ``options`` say; modules may have engines of their own."""
    from tests.vllm_plugin.engines import start

    return start(smollm2, request.cls.options, kv_mib=300, skip_tokenizer_init=False)


@pytest.fixture(scope="module")
def smollm2() -> str:
    """Folder of SmolLM2."""
    from centroidkv.integrations.transformers.models import smollm2_folder

    try:
        return str(smollm2_folder())
    except FileNotFoundError as error:
        pytest.skip(str(error))
