"""The serving benchmark: command lines, what is read off servers and clients, tables; a whole run without vLLM."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from serve_samples import CLIENT, LOG, METRICS, PROGRAM

from analysis.benchmarks import serve_bench, serving
from centroidkv.errors import EvaluationError, ServingError

LOAD = serving.Load("python-of-vllm", Path("a folder"), "smollm2", 500, 16, 2, threads=3)


def following(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_both_servers_get_the_same_command_but_for_the_plugin():
    stock = LOAD.server_command(300, 1234, None)
    plugin = LOAD.server_command(300, 1234, {"preset": "quick", "budget": 0.25})
    assert plugin[: len(stock)] == stock
    assert plugin[len(stock) :: 2] == ["--worker-cls", "--additional-config"]
    assert following(plugin, "--worker-cls") == "centroidkv.integrations.vllm.Worker"
    assert json.loads(following(plugin, "--additional-config")) == {"centroidkv": {"preset": "quick", "budget": 0.25}}
    assert following(stock, "--kv-cache-memory-bytes") == str(300 * 1024**2)
    assert int(following(stock, "--max-model-len")) >= 500 + 16
    assert {"--no-enable-prefix-caching", "--enforce-eager"} <= set(stock)


def test_the_client_sends_all_at_once_and_wants_full_answers(tmp_path):
    command = LOAD.client_command(1234, tmp_path / "result.json", seed=7)
    for name, value in {"--request-rate": "inf", "--num-prompts": "2", "--output-len": "16", "--seed": "7"}.items():
        assert following(command, name) == value
    assert following(command, "--dataset-name") == "random"
    assert following(command, "--input-len") == "500"
    assert "--ignore-eos" in command
    texts = serving.Load(*("python", Path("f"), "n", 500, 16, 2), prompts=Path("p.jsonl"))
    command = texts.client_command(1234, tmp_path / "result.json", seed=7)
    assert following(command, "--dataset-path") == "p.jsonl"
    assert "--skip-chat-template" in command  # it would add tokens
    assert "--input-len" not in command


def test_servers_run_this_checkout_offline():
    environment = LOAD.environment()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(serving.__file__).parents[2])
    assert environment["HF_HUB_OFFLINE"] == environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_NUM_THREADS"] == "3"


def test_metrics_are_summed_over_labels():
    found = serving.metrics(METRICS)
    assert found["python_gc_objects_collected_total"] == 14706 + 2369
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:num_preemptions_total"] == 3
    assert found["blocks"] == 22


def test_the_mean_of_running_requests_leaves_out_when_nothing_ran():
    def sample(running, preempted, usage):
        names = ("vllm:num_requests_running", "vllm:num_preemptions_total", "vllm:kv_cache_usage_perc")
        return dict(zip(names, (running, preempted, usage), strict=True))

    samples = [sample(0, 5, 0), sample(1, 5, 0.5), sample(4, 6, 1), sample(4, 8, 0.9), sample(0, 8, 0)]
    assert serving.watched(samples) == {"running_mean": 3, "running_max": 4, "preemptions": 3, "kv_usage_max": 1}
    assert serving.watched(samples[:1])["running_mean"] == 0


def test_the_clients_numbers_are_kept_if_they_are_of_the_whole_load():
    kept = LOAD.accepted(CLIENT)
    assert kept["output_throughput"] == CLIENT["output_throughput"]
    assert kept["p99_e2el_ms"] == CLIENT["p99_e2el_ms"]
    assert {"std_ttft_ms", "date"}.isdisjoint(kept)
    for key, value in {"completed": 1, "total_output_tokens": 31}.items():
        with pytest.raises(EvaluationError, match=f"'{key}': {value}"):
            LOAD.accepted(CLIENT | {key: value})


def test_the_reason_is_the_first_error_and_no_warning():
    assert serving.reason(LOG) == "ValueError: To serve at least one request, 0.01 GiB are needed"
    assert serving.reason("a\nkilled\n") == "killed"
    assert serving.reason("x\ncentroidkv.errors.ServingError: no\n") == "centroidkv.errors.ServingError: no"
    assert serving.reason("") == "it said nothing"


def test_prompts_are_passages_of_exactly_so_many_tokens(tmp_path, letters):
    letters.decode = lambda ids: "".join(chr(32 + i - 3) for i in ids)
    (tmp_path / "a.txt").write_text("abcdefghij")
    (tmp_path / "b.txt").write_text("klmnop")
    files, path = sorted(tmp_path.glob("*.txt")), tmp_path / "prompts.jsonl"
    serve_bench.write_prompts(letters, files, 4, 3, path)
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == ["abcd", "efgh", "klmn"]
    with pytest.raises(EvaluationError, match="3 passages of 4 tokens, 5 are needed"):
        serve_bench.write_prompts(letters, files, 4, 5, path)


class Pairs:
    """A tokenizer that reads "ab" as one token, and cannot write it at the beginning of a text."""

    def __call__(self, text, add_special_tokens=True):
        return SimpleNamespace(input_ids=list(text.replace("ab", "X")))

    def decode(self, ids):
        text = "".join(ids)
        return ("??" + text[1:] if text[0] == "X" else text).replace("X", "ab")


def test_a_passage_that_would_be_read_differently_is_passed_over(tmp_path):
    (tmp_path / "a.txt").write_text("abcdeab")
    path = tmp_path / "prompts.jsonl"
    serve_bench.write_prompts(Pairs(), [tmp_path / "a.txt"], 2, 2, path)
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == ["cd", "eab"]


def test_contenders_are_refused_before_any_server_starts():
    options = serve_bench.arguments(["--preset", "centroidkv", "quick", "--budget", "512", "--interval", "64"])
    assert list(serve_bench.contenders(options)) == ["stock", "centroidkv 512 slots", "quick 512 slots"]
    assert serve_bench.contenders(options)["quick 512 slots"] == {"preset": "quick", "budget": 512, "interval": 64}
    with pytest.raises(ServingError, match="queries"):
        serve_bench.contenders(serve_bench.arguments(["--preset", "balanced"]))


def test_the_table_divides_medians_and_shows_who_did_not_start():
    def cell(*speeds):
        return {"runs": [{"output_throughput": speed} for speed in speeds]}

    cells = {"stock | 300 MiB": cell(30.0, 10.0, 20.0), "tome 50% | 300 MiB": cell(30.0), "stock | 100 MiB": cell(4.0)}
    found = serve_bench.speeds(cells, ["stock", "tome 50%"], [300, 100])
    assert found == {"stock": {100: 4.0, 300: 20.0}, "tome 50%": {300: 30.0}}
    rows = [
        [part.strip() for part in line.strip("|").split("|")]
        for line in serve_bench.table(found, [100, 300]).splitlines()
    ]
    assert rows[0] == ["KV MiB", "stock tok/s", "tome 50% tok/s", "ratio"]
    assert rows[2:] == [["100", "4.0", "did not start", ""], ["300", "20.0", "30.0", "1.50x"]]


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc to see what is left")
def test_a_whole_run_leaves_results_a_picture_and_no_processes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serving, "POLL", 0.05)
    python = tmp_path / "python"
    python.write_text(PROGRAM.format(python=sys.executable, log=LOG, metrics=METRICS, client=CLIENT))
    python.chmod(0o755)
    given = [
        "--python", str(python), "--model", str(tmp_path), "--kv-mib", "4", "16", "--prompt", "500", "--output", "16",
        "--requests", "2", "--json", str(tmp_path / "found.json"), "--picture", str(tmp_path / "picture.png"),
    ]  # fmt: skip
    serve_bench.main(given)
    said = capsys.readouterr()
    assert "stock | 4 MiB did not start: ValueError: To serve at least one request" in said.err
    assert [part.strip() for part in said.out.strip().splitlines()[-1].strip("|").split("|")] == [
        "16", "2.1", "4.2", "2.00x",
    ]  # fmt: skip
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["settings"]["model"] == tmp_path.name  # no path of this machine
    assert set(written["cells"]) == {"stock | 16 MiB", "centroidkv 25% | 16 MiB"}
    cell = written["cells"]["centroidkv 25% | 16 MiB"]
    assert cell["blocks"] == 22
    assert cell["vllm"] == "0.32.0"
    assert cell["runs"][0]["running_max"] == 2
    assert {"torch", "device"} <= set(cell["served_by"])
    assert "commit" in cell["environment"]
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert len(children) == 2
    until = time.monotonic() + 5
    while not all(gone(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(gone(pid) for pid in children)

    (tmp_path / "children").unlink()  # measured sizes are not served again
    serve_bench.main([*given[:5], "16", *given[7:]])
    assert not (tmp_path / "children").exists()
    assert "2.00x" in capsys.readouterr().out


def test_texts_need_pandas_where_vllm_is(tmp_path):
    python = tmp_path / "python"
    python.write_text(PROGRAM.format(python=sys.executable, log=LOG, metrics=METRICS, client=CLIENT))
    python.chmod(0o755)
    with pytest.raises(EvaluationError, match="pandas"):
        serve_bench.server_environment(str(python), texts=True)
    with pytest.raises(EvaluationError, match="--python"):
        serve_bench.server_environment(str(tmp_path / "nothing"), texts=False)
