"""What a worker counts, where it can be read, and that two processes are added up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from centroidkv.integrations.vllm import ServingOptions, metrics
from centroidkv.integrations.vllm.metrics import ClusteringStats
from centroidkv.integrations.vllm.options import plan_of


def events():
    import torch

    return list(plan_of(ServingOptions(interval=100), 32, torch.bfloat16).events(1000, 0, 1300))


def test_requests_events_blocks_and_seconds_are_counted(monkeypatch):
    monkeypatch.setattr(metrics, "SECONDS_BETWEEN_LINES", 0.0)
    stats = ClusteringStats("some model")
    assert stats.line() is None  # nothing happened
    due = events()
    for event in due:
        stats.note("a", event, 0.5)
    stats.note("b", due[0], 0.25)
    blocks = sum(event.source_blocks - event.target_blocks for event in [*due, due[0]])
    assert (stats.requests, stats.events, stats.blocks, stats.seconds) == (2, len(due) + 1, blocks, len(due) / 2 + 0.25)
    assert stats.line() == (
        f"Clustered 2 requests {len(due) + 1} times so far, returned {blocks} blocks, spent {len(due) / 2 + 0.25:.1f} s"
    )
    stats.forget("a")
    stats.note("a", due[0], 0.0)  # another request of that name
    assert stats.requests == 3


def test_lines_are_not_written_after_every_event(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    stats = ClusteringStats("some model")
    stats.note("a", events()[0], 0.1)
    assert stats.line() is not None
    assert stats.line() is None
    clock[0] += 10
    assert stats.line() is not None


CODE = """
import sys
from pathlib import Path
from prometheus_client import generate_latest
from tests.vllm_plugin.test_metrics import events
from centroidkv.integrations.vllm.metrics import ClusteringStats
for name in ("x", "x"):  # two engines in one process share the counters
    ClusteringStats(name).note("a", events()[0], 0.5)
if len(sys.argv) > 1:
    from prometheus_client import CollectorRegistry, multiprocess
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
else:
    print(generate_latest().decode())
"""


def run(*arguments: str, **environment: str) -> str:
    given = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_counters_appear_with_their_labels_and_are_added_up_over_processes(tmp_path):
    alone = run()
    assert 'centroidkv:clustered_requests_total{model_name="x"} 2.0' in alone
    assert 'centroidkv:clustering_seconds_total{model_name="x"} 1.0' in alone
    folder = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run("joined", **folder)
    assert 'centroidkv:clusterings_total{model_name="x"} 4.0' in run("joined", **folder)


def test_the_documentation_names_every_counter():
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    for name in metrics.COUNTERS:
        assert f"| `{metrics.PREFIX}{name}_total` |" in page
