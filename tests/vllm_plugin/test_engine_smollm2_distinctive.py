"""Preset ``distinctive`` on SmolLM2 in a real engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.on_smollm2 import OnSmolLM2

pytestmark = pytest.mark.slow


class TestDistinctive(OnSmolLM2):
    preset = "distinctive"
