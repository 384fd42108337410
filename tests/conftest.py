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


def pytest_terminal_summary(terminalreporter) -> None:
    """The matrix of tests/integrations/test_matrix.py: which model passes in which situation, and why not."""
    cells: dict[tuple[str, str], str] = {}
    reasons: dict[str, None] = {}
    for outcome, mark in (("passed", "+"), ("skipped", "-"), ("failed", "FAIL")):
        for report in terminalreporter.getreports(outcome):
            told = dict(getattr(report, "user_properties", ()))
            if "refused model" in told:
                reasons[f"refused  {told['refused model']:.118}"] = None
            if "column" not in told:
                continue
            cells[told["row"], told["column"]] = "refused" if "refused" in told else mark
            if outcome == "skipped":
                reasons[f"-        {told['row']}: {report.longrepr[2].removeprefix('Skipped: ')}"] = None
            elif "refused" in told:
                reasons[f"refused  {told['row']}: {told['refused']}"] = None
    if not cells:
        return
    rows, columns = (list(dict.fromkeys(cell[i] for cell in cells)) for i in (0, 1))
    import transformers

    terminalreporter.section(f"matrix on transformers {transformers.__version__}")
    terminalreporter.write_line(" " * 26 + " ".join(f"{column:>9.9}" for column in columns))
    for row in rows:
        marks = (cells.get((row, column), "") for column in columns)
        terminalreporter.write_line(f"{row:26}" + " ".join(f"{mark:>9}" for mark in marks))
    for reason in reasons:
        terminalreporter.write_line(reason)
