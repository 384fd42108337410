"""A vLLM server and vLLM's own benchmark client as subprocesses: command lines, lives, metrics."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from centroidkv.errors import EvaluationError
from centroidkv.integrations.vllm import SECTION, WORKER

CHECKOUT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
SPARE = 32
"""Tokens a request may be longer than planned: text cut by tokens may be one or two more when it is read again."""
POLL = 0.5
"""Seconds between two looks at a server: a few steps of it, and little work beside them."""
# Not `vllm bench serve`: the command asks for a distribution called vllm, and the CPU builds have another name.
CLIENT = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
DURATIONS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
"""The client's names of what it times, and the usual ones."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """What every server gets: the model, and ``requests`` of ``prompt`` tokens at once, each answered by ``output``."""

    python: str
    folder: Path
    name: str
    prompt: int
    output: int
    requests: int
    block_size: int = 32
    batched_tokens: int = 2048
    eager: bool = True
    threads: int = 1
    prompts: Path | None = None  # JSON lines with a "prompt" each; None: random tokens

    def server_command(self, kv_mib: int, port: int, plugin: dict[str, Any] | None) -> list[str]:
        """Starts a server with ``kv_mib`` MiB of caches: stock, or clustering with the options ``plugin``."""
        command = [
            self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder),
            "--served-model-name", self.name, "--host", HOST, "--port", str(port), "--dtype", "bfloat16",
            "--kv-cache-memory-bytes", str(kv_mib << 20), "--block-size", str(self.block_size),
            "--max-model-len", str(self.prompt + self.output + SPARE),
            "--max-num-batched-tokens", str(self.batched_tokens), "--no-enable-prefix-caching",
        ]  # fmt: skip
        if self.eager:
            command.append("--enforce-eager")
        if plugin is not None:
            command += ["--worker-cls", WORKER, "--additional-config", json.dumps({SECTION: plugin})]
        return command

    def client_command(self, port: int, result: Path, seed: int) -> list[str]:
        """Sends the requests, and writes what a user saw of the server to ``result``."""
        data = ["--dataset-name", "random", "--input-len", str(self.prompt)]
        if self.prompts is not None:
            data = ["--dataset-name", "custom", "--dataset-path", str(self.prompts)]
            data += ["--skip-chat-template", "--disable-shuffle"]
        return [
            self.python, "-c", CLIENT, "--host", HOST, "--port", str(port), "--model", self.name,
            "--tokenizer", str(self.folder), *data, "--output-len", str(self.output), "--ignore-eos",
            "--num-prompts", str(self.requests), "--request-rate", "inf", "--temperature", "0", "--seed", str(seed),
            "--percentile-metrics", ",".join(DURATIONS), "--metric-percentiles", ",".join(map(str, PERCENTILES)),
            "--disable-tqdm", "--save-result", "--result-dir", str(result.parent), "--result-filename", result.name,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """For both: offline, no pinned cores (others may want them), and the plugin of this checkout, not another."""
        path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
        ours = {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": path, "no_proxy": HOST, "NO_PROXY": HOST,
        }  # fmt: skip
        return os.environ | ours

    def accepted(self, result: dict[str, Any]) -> dict[str, float]:
        """The numbers to keep of the client's JSON, times in milliseconds.

        Raises:
            EvaluationError: requests failed or were answered short, so that the throughput is not that of the load.
        """
        wanted = {"completed": self.requests, "total_output_tokens": self.requests * self.output}
        got = {key: result[key] for key in wanted}
        if got != wanted:
            raise EvaluationError(f"the client reports {got}, the load is {wanted}; see the server's log (--logs)")
        kept = ("duration", "total_input_tokens", "total_output_tokens", "output_throughput")
        times = (f"{of}_{name}_ms" for name in DURATIONS for of in ("mean", *(f"p{p}" for p in PERCENTILES)))
        return {key: result[key] for key in (*kept, *times)}


class Refused(EvaluationError):
    """The server did not start: its own reason."""


@contextmanager
def running(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, with whatever it starts; the group is ended on the way out, come what may."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        until = time.monotonic() + patience
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < until:
                process.poll()  # a leader that nobody waits for keeps its group alive
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            return


@contextmanager
def serving(
    load: Load, kv_mib: int, plugin: dict[str, Any] | None, log: Path, patience: float
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server that answers, and its port.

    Raises:
        Refused: it ended instead, or was not up after ``patience`` seconds.
    """
    port = free_port()
    with running(load.server_command(kv_mib, port, plugin), load.environment(), log) as server:
        until = time.monotonic() + patience
        while not healthy(port):
            if server.poll() is not None:
                raise Refused(reason(log.read_text(errors="replace")))
            if time.monotonic() > until:
                raise Refused(f"not up after {patience:.0f} s (--patience)")
            time.sleep(POLL)
        yield server, port


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    """What the server answers: a GET, or a POST of ``body``. Proxies of the environment are not asked."""
    data, header = None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{HOST}:{port}{path}", data, header)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        return str(answer.read().decode())


def healthy(port: int) -> bool:
    """Whether a server answers there and is well."""
    try:
        get(port, "/health")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


def reason(log: str) -> str:
    """The first error in a log: later ones only say that something went wrong before."""
    errors = re.findall(r"(?m)(?:^|\] )([\w.]*(?:Error|Exception): .+)$", log)  # not those that warnings speak of
    return errors[0].strip() if errors else (log.strip().splitlines() or ["it said nothing"])[-1]


def metrics(text: str) -> dict[str, float]:
    """The values of a Prometheus page by name, summed over their labels; and ``blocks``, how many the caches have."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = re.match(r"[a-zA-Z_:][\w:]*", line)
        if name is None:  # empty, or a comment
            continue
        found[name[0]] = found.get(name[0], 0.0) + float(line.rpartition(" ")[2])
        if name[0] == "vllm:cache_config_info" and (blocks := re.search(r'\bnum_gpu_blocks="(\d+)"', line)):
            found["blocks"] = found.get("blocks", 0.0) + int(blocks[1])
    return found


def watched(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """What a server did between the first and the last of ``samples``, which are evenly spaced in time.

    The mean number of running requests is over the samples in which any ran: the client also starts and ends meanwhile.
    """
    active = [sample["vllm:num_requests_running"] for sample in samples]
    active = [count for count in active if count]
    preempted = [sample["vllm:num_preemptions_total"] for sample in samples]
    return {
        "running_mean": sum(active) / len(active) if active else 0.0,
        "running_max": max(active, default=0.0),
        "preemptions": preempted[-1] - preempted[0],
        "kv_usage_max": max(sample["vllm:kv_cache_usage_perc"] for sample in samples),
    }


def warm_up(load: Load, port: int) -> None:
    """A short request, so that the first to be timed does not also pay for what happens once."""
    prompt = list(range(100, 100 + min(load.prompt, 256)))
    get(port, "/v1/completions", {"model": load.name, "prompt": prompt, "max_tokens": 4, "ignore_eos": True})


def drive(
    load: Load, server: subprocess.Popen[bytes], port: int, files: Path, seed: int, limit: float,
    progress: Callable[[int], object],
) -> dict[str, float]:  # fmt: skip
    """One run of the client against a server: the client's numbers, and what the server said meanwhile.

    ``progress`` hears of new output tokens. Raises EvaluationError if either ends early or after ``limit`` seconds.
    """
    result, log = files / f"client_{seed}.json", files / f"client_{seed}.log"
    samples, until = [metrics(get(port, "/metrics"))], time.monotonic() + limit
    with running(load.client_command(port, result, seed), load.environment(), log) as client:
        while client.poll() is None:
            time.sleep(POLL)
            if server.poll() is not None:
                raise EvaluationError("the server ended during the run; see its log (--logs)")
            if time.monotonic() > until:
                raise EvaluationError(f"the run was not over after {limit:.0f} s (--limit)")
            samples.append(metrics(get(port, "/metrics")))
            counts = [sample.get("vllm:generation_tokens_total", 0.0) for sample in samples[-2:]]
            progress(int(counts[1] - counts[0]))
    if client.returncode or not result.exists():
        raise EvaluationError(f"the client failed: {reason(log.read_text(errors='replace'))}")
    samples.append(metrics(get(port, "/metrics")))
    return load.accepted(json.loads(result.read_text())) | watched(samples)
