"""Shared set-up: Hypothesis profiles and the random states most tests start from."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings

from centroidkv import KVState, Rotary

# Without a GPU, kernels run through Triton's interpreter. Triton reads this when a kernel is defined, and nothing above
# has imported one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "ci", max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("thorough", max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Tests run on tiny tensors, and often in two processes: threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def make_state():
    """A function (slots, ...) -> random KVState with a known rotation."""

    def make(
        slots: int, batch: int = 2, heads: int = 2, size: int = 16, dtype: torch.dtype = torch.float32, mask=None,
        queries: bool = False,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(slots)
        keys = torch.randn(batch, heads, slots, size, generator=generator).to(dtype)
        values = torch.randn(batch, heads, slots, size // 2, generator=generator).to(dtype)
        state = KVState.from_kv(keys, values, mask, rotary=Rotary.from_theta(1e4, size))
        asked = torch.randn(batch, heads, 12, size, generator=generator)
        return replace(state, head_data={"queries": asked}) if queries else state

    return make
