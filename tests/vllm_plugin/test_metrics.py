"""What the API server counts and logs, with stand-ins for vLLM's configuration and statistics."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, generate_latest
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter, load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats

from centroidkv.errors import ServingError
from centroidkv.integrations.vllm import ServingOptions, ServingPlan
from centroidkv.integrations.vllm.metrics import METRICS, ClusteringStats, Counts, logger

WORKER = "centroidkv.integrations.vllm.Worker"
PLAN = ServingPlan(ServingOptions().compressor(), 32, 128)


def config(given=None, worker=WORKER):
    return SimpleNamespace(
        additional_config={"centroidkv": {}} if given is None else given,
        parallel_config=SimpleNamespace(worker_cls=worker),
        model_config=SimpleNamespace(served_model_name="tiny", dtype=torch.bfloat16),
        cache_config=SimpleNamespace(block_size=32),
    )


def finished(*requests):
    """A step in which requests of (prompt, generated) tokens finish."""
    stats = IterationStats()
    for prompt, generated in requests:
        stats.finished_requests.append(
            FinishedRequestStats(FinishReason.STOP, num_prompt_tokens=prompt, num_generation_tokens=generated)
        )
    return stats


def sample(name, engine=0):
    return REGISTRY.get_sample_value(f"{name}_total", {"model_name": "tiny", "engine": str(engine)})


@pytest.fixture(autouse=True)
def _clean_registry():
    yield
    for name in METRICS:
        if name in REGISTRY._names_to_collectors:
            REGISTRY.unregister(REGISTRY._names_to_collectors[name])


# -- the counts of one request -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "generated", "wanted"),
    [
        # 31 of 125 full blocks stay: the first event gives back 94.
        (4000, 0, Counts()),  # stopped before its prompt was computed
        (4000, 1, Counts(1, 1, 0)),  # clustered in its only step; its end gives the blocks back
        (4000, 2, Counts(1, 1, 94)),
        (4000, 128, Counts(1, 1, 94)),  # 4127 tokens computed: one less than the second event
        (4000, 129, Counts(1, 2, 94)),
        (4000, 130, Counts(1, 2, 97)),  # 129 full blocks, of which 32 stay
        (100, 100, Counts()),  # too short for its windows
    ],
)
def test_counts_of_a_request_by_hand(prompt, generated, wanted):
    assert Counts.of(PLAN, prompt, generated) == wanted


@given(st.integers(1, 3000), st.integers(0, 1500))
def test_counts_are_what_a_run_step_by_step_would_do(prompt, generated):
    events = blocks = given_back = 0
    for computed in range(prompt, prompt + generated):  # the prompt, then token by token
        blocks += given_back - blocks  # scheduled: what earlier steps made free is given back
        new = list(PLAN.events(prompt, computed - 1, computed))
        events += len(new)
        given_back = new[-1].after.first if new else given_back
    assert Counts.of(PLAN, prompt, generated) == Counts(int(events > 0), events, blocks)


# -- the logger --------------------------------------------------------------------------------------------------------


def test_without_options_nothing_is_touched():
    before = dict(REGISTRY._names_to_collectors)
    for additional in ({}, {"other": {}}, object()):  # vLLM also takes objects that only have a hash
        stats = ClusteringStats(config(additional, worker="vllm.v1.worker.gpu_worker.Worker"), [0])
        stats.log_engine_initialized()
        stats.record(None, finished((4000, 200)), mm_cache_stats=None, engine_idx=0)
        stats.record_sleep_state(1, 1)
        stats.record_admission_rejection("max_num_queued_reqs")
        stats.log()
    assert before == REGISTRY._names_to_collectors


def test_requests_are_counted_per_engine():
    stats = ClusteringStats(vllm_config=config(), engine_indexes=[0, 1])
    assert [sample(name) for name in METRICS] == [0, 0, 0]  # there before the first request
    stats.record(None, None)
    stats.record(scheduler_stats=None, iteration_stats=finished(), mm_cache_stats=None, engine_idx=0)
    stats.record(None, finished((4000, 130), (100, 5), (4000, 2)), engine_idx=0)
    stats.record(None, finished((4000, 2)), engine_idx=1)
    assert [sample(name) for name in METRICS] == [2, 3, 97 + 94]
    assert [sample(name, engine=1) for name in METRICS] == [1, 1, 94]
    text = generate_latest(REGISTRY).decode()
    assert 'centroidkv:returned_blocks_total{engine="1",model_name="tiny"} 94.0' in text
    assert all(f"# HELP {name}_total {says}" in text for name, says in METRICS.items())


def test_another_engine_in_the_process_begins_anew():
    ClusteringStats(config(), [0]).record(None, finished((4000, 2)))
    assert sample("centroidkv:clusterings") == 1
    ClusteringStats(config(), [0])
    assert sample("centroidkv:clusterings") == 0


def test_a_line_is_logged_only_after_news(monkeypatch):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.setLevel(logging.INFO)
    stats = ClusteringStats(config(), [0, 1])
    stats.log_engine_initialized()
    said = lines.pop()
    assert "budget=0.25" in said
    assert "blocks of 32" in said
    stats.record(None, finished((100, 5)))
    stats.log()
    assert lines == []
    stats.record(None, finished((4000, 130)), engine_idx=1)
    stats.log()
    stats.log()
    stats.record(None, finished((4000, 2), (4000, 2)), engine_idx=1)
    stats.log()
    assert lines == [
        "Engine 001: Clustered 1 requests 2 times, returned 97 blocks (in all 1 requests, 97 blocks)",
        "Engine 001: Clustered 2 requests 2 times, returned 188 blocks (in all 3 requests, 285 blocks)",
    ]


def test_lines_go_where_vllms_own_go():
    vllms = logging.getLogger("vllm")  # the one that its configuration gives a handler
    assert logger.parent is vllms


@pytest.mark.parametrize(
    ("given", "worker", "says"),
    [
        ({"centroidkv": {}}, "vllm.v1.worker.gpu_worker.Worker", "add --worker-cls " + WORKER),
        ({"centroidkv": {"buget": 1}}, WORKER, "buget"),
    ],
)
def test_a_server_that_would_not_do_what_it_was_asked_is_refused(given, worker, says):
    with pytest.raises(ServingError, match=says):
        ClusteringStats(config(given, worker), [0])
    assert not set(METRICS) & set(REGISTRY._names_to_collectors)


def test_the_documents_name_every_counter():
    text = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    assert all(f"`{name}_total`" in text for name in METRICS)


# -- how vLLM finds it -------------------------------------------------------------------------------------------------


def test_vllms_loader_takes_the_entry_point(monkeypatch):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = "vllm.stat_logger_plugins"
    ((name, value),) = project["entry-points"][group].items()
    found = [importlib.metadata.EntryPoint(name, value, group)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    (factory,) = load_stat_logger_plugin_factories()
    assert factory is ClusteringStats
    # One for all engines: vLLM would otherwise make one per engine, and the second would find its names taken.
    assert not isinstance(factory(vllm_config=config(), engine_indexes=[0, 1]), PerEngineStatLoggerAdapter)


SERVER = """
from test_metrics import *
from vllm.v1.metrics.prometheus import get_prometheus_registry
ClusteringStats(config(), [0]).record(None, finished((4000, {generated})))
print("served:", *(line for line in generate_latest(get_prometheus_registry()).decode().splitlines()
    if line.startswith("centroidkv:clusterings_total")))
"""


def served(generated, folder):
    """What /metrics of an API server would say after one request, in a process of its own."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    more = {"PROMETHEUS_MULTIPROC_DIR": str(folder)} if folder else {}
    code = SERVER.format(generated=generated)
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **more},
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("served:")]
    return float(line.rpartition(" ")[2])


@pytest.mark.slow
def test_several_api_servers_add_up_in_the_shared_folder(tmp_path):
    assert served(2, None) == 1
    assert served(2, tmp_path) == 1
    assert served(129, tmp_path) == 3
