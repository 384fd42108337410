"""Preset ``distinctive`` on SmolLM2 in a real engine."""

from __future__ import annotations

from typing import ClassVar

import pytest

pytest.importorskip("vllm")

from tests.vllm_plugin.on_smollm2 import COMMON, OnSmolLM2

pytestmark = pytest.mark.slow


class TestDistinctive(OnSmolLM2):
    options: ClassVar[dict] = {"preset": "distinctive", **COMMON}
