"""What a vLLM server gains by clustering: a stock server and the plugin at equal KV bytes, from tight to ample.

python -m analysis serve_bench [--kv-mib 100 150 200 300 600] [--preset centroidkv] [--budget 0.25] [--json FILE]

Every size and contender is a fresh OpenAI-compatible server; vLLM's own client sends it all requests at once. Where
the caches of all requests do not fit, a server makes some wait, and throughput depends on how many it can run; where
they fit, the difference is what clustering costs and what shorter caches save. Prefixes are not cached, and every
answer has the same length. ``running`` is what the server's /metrics say, twice a second.

Requests are the client's random tokens: how much is merged, and so the time and the bytes, is the plan's, whatever the
text says. ``--texts FOLDER`` sends prose of a folder's .txt files instead, for which the client needs pandas.

Needs vLLM and this package installed in the environment of ``--python`` (this one if not given); the code of this
checkout is what serves. With ``--json`` an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from analysis.benchmarks.serving import DURATIONS, Load, Refused, drive, get, metrics, serving, warm_up
from analysis.tools.store import Store, device_name
from centroidkv import presets
from centroidkv.cli.demo import format_table
from centroidkv.errors import EvaluationError
from centroidkv.integrations.transformers.models import gemma3_270m_folder, smollm2_folder
from centroidkv.integrations.vllm import ServingOptions

STOCK = "stock"
FOLDERS = {"smollm2": smollm2_folder, "gemma3-270m": gemma3_270m_folder}


def budget(text: str) -> float | int:
    """A share in (0, 1) or a whole number of slots."""
    return int(text) if text.isdigit() else float(text)


def contenders(options: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """The plugin's options by the name of a contender; None: the stock server.

    Raises:
        ServingError: a preset, budget or interval that no server can use; before any was started.
    """
    found: dict[str, dict[str, Any] | None] = {STOCK: None}
    size = options.budget
    for preset in options.preset:
        served = ServingOptions(preset=preset, budget=size, interval=options.interval)
        name = f"{preset} {size} slots" if isinstance(size, int) else f"{preset} {100 * size:.4g}%"
        found[name] = {key: value for key, value in asdict(served).items() if value is not None}
    return found


def cell_name(contender: str, kv_mib: int) -> str:
    """The key of a result."""
    return f"{contender} | {kv_mib} MiB"


def write_prompts(tokenizer: Any, files: Sequence[Path], tokens: int, count: int, path: Path) -> None:
    """``count`` different passages of exactly ``tokens`` tokens, for the client.

    Raises:
        EvaluationError: the texts are too short for that.
    """
    prompts = []
    for file in files:
        ids = tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        start = 0
        while start + tokens <= len(ids) and len(prompts) < count:
            passage = tokenizer.decode(ids[start : start + tokens])
            if len(tokenizer(passage).input_ids) == tokens:
                prompts.append(passage)
                start += tokens
            else:  # cut inside what the tokenizer reads as one: a little further on it fits
                start += 1
    if len(prompts) < count:
        raise EvaluationError(
            f"{len(files)} .txt files hold {len(prompts)} passages of {tokens} tokens, {count} are needed; "
            "use more text, a shorter --prompt or fewer --requests"
        )
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def measure(
    load: Load, kv_mib: int, plugin: dict[str, Any] | None, options: argparse.Namespace, logs: Path, bar: Any
) -> dict[str, Any]:
    """Start a server, send it the load ``--repeats`` times, end it."""
    start = time.monotonic()
    with serving(load, kv_mib, plugin, logs / "server.log", options.patience) as (server, port):
        took = time.monotonic() - start
        blocks = metrics(get(port, "/metrics"))["blocks"]
        version = json.loads(get(port, "/version"))["version"]
        warm_up(load, port)
        runs = [
            drive(load, server, port, logs, seed, options.limit, bar.update) for seed in range(1, options.repeats + 1)
        ]
    return {"blocks": int(blocks), "start_seconds": took, "vllm": version, "plugin": plugin, "runs": runs}


def server_environment(python: str, texts: bool) -> dict[str, str]:
    """The versions that serve, which need not be this process's, and the device.

    Raises:
        EvaluationError: that interpreter lacks something; said before any server is started.
    """
    asked = (
        "import json, torch; from importlib.metadata import version; from importlib.util import find_spec\n"
        "gpu = torch.cuda.is_available()\n"
        "print(json.dumps({'vllm': bool(find_spec('vllm')), 'pandas': bool(find_spec('pandas')), 'kept': {\n"
        "'torch': torch.__version__, 'transformers': version('transformers'),\n"
        "'device': torch.cuda.get_device_name() if gpu else ''}}))"
    )
    try:
        answer = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EvaluationError(f"--python {python} does not say which torch and transformers it has: {error}") from error
    found = json.loads(answer.splitlines()[-1])
    if not found["vllm"]:
        raise EvaluationError(f"{python} has no vLLM; name the interpreter of an environment that does (--python)")
    if texts and not found["pandas"]:
        raise EvaluationError(f"vLLM's client reads --texts by pandas, which {python} lacks; install it, or send none")
    kept: dict[str, str] = found["kept"]
    return kept | {"device": kept["device"] or device_name("cpu")}


def middle(cell: dict[str, Any], key: str) -> float:
    """The median over the runs of a result."""
    return median(run[key] for run in cell["runs"])


def details(cells: dict[str, Any], names: Sequence[str], sizes: Sequence[int]) -> str:
    """What was seen of every server; times are medians over requests, of the median run."""
    header = ["KV MiB", "server", "blocks", "running", "at most", "preempted"]
    header += [f"{name} {'ms' if key in ('tpot', 'itl') else 's'}" for key, name in DURATIONS.items()] + ["E2E p99 s"]
    rows = []
    for size in sizes:
        for name in names:
            cell = cells.get(cell_name(name, size))
            if cell is None:
                continue
            times = [middle(cell, f"p50_{key}_ms") / (1 if key in ("tpot", "itl") else 1e3) for key in DURATIONS]
            times.append(middle(cell, "p99_e2el_ms") / 1e3)
            rows.append(
                [
                    str(size), name, str(cell["blocks"]), f"{middle(cell, 'running_mean'):.1f}",
                    f"{middle(cell, 'running_max'):.0f}", f"{middle(cell, 'preemptions'):.0f}",
                    *(f"{value:.1f}" for value in times),
                ]
            )  # fmt: skip
    return format_table(header, rows)


def speeds(cells: dict[str, Any], names: Sequence[str], sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Output tokens per second by contender and KV size, of what was measured, sizes ascending."""
    return {
        name: {
            size: middle(cells[cell_name(name, size)], "output_throughput")
            for size in sorted(sizes)
            if cell_name(name, size) in cells
        }
        for name in names
    }


def table(found: dict[str, dict[int, float]], sizes: Sequence[int]) -> str:
    """Output tokens per second by KV size: the stock server, every other, and how many times the stock server's."""
    stock, *others = found
    header = ["KV MiB", f"{stock} tok/s"]
    for name in others:
        header += [f"{name} tok/s", "ratio"]
    rows = []
    for size in sizes:
        row = [str(size), _said(found[stock].get(size))]
        for name in others:
            both = size in found[stock] and size in found[name]
            row += [_said(found[name].get(size)), f"{found[name][size] / found[stock][size]:.2f}x" if both else ""]
        rows.append(row)
    return format_table(header, rows)


def _said(speed: float | None) -> str:
    return "did not start" if speed is None else f"{speed:.1f}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m or a model folder")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--kv-mib", type=int, nargs="+", default=[100, 150, 200, 300, 600])
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=384, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--texts", type=Path, help="a folder of .txt files to cut prompts from; default: random tokens")
    parser.add_argument("--preset", nargs="+", default=["centroidkv"], choices=presets.ALL)
    parser.add_argument("--budget", type=budget, default=0.25, help="share to keep, or slots per request")
    parser.add_argument("--interval", type=int, default=128, help="tokens between two compressions of a request")
    parser.add_argument("--repeats", type=int, default=1, help="times that a server gets the load; shown are medians")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--batched-tokens", type=int, default=2048, help="most tokens of one step")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True, help="nothing is compiled")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    parser.add_argument("--patience", type=float, default=600, help="seconds for a server to start")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one run of the client")
    parser.add_argument("--logs", type=Path, help="keep what servers and clients say there, a folder for each server")
    parser.add_argument("--json", type=Path, help="write the results there, and go on from them")
    parser.add_argument("--picture", type=Path, help="plot throughput and ratio by KV size")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Serve, measure, print the tables."""
    options = arguments(argv)
    if options.picture and find_spec("matplotlib") is None:
        raise EvaluationError("--picture needs matplotlib here; install it, or measure with --json and draw elsewhere")
    plugins = contenders(options)
    folder = FOLDERS[options.model]() if options.model in FOLDERS else Path(options.model).resolve()
    name = options.model if options.model in FOLDERS else folder.name
    load = Load(
        options.python, folder, name, options.prompt, options.output, options.requests, options.block_size,
        options.batched_tokens, options.eager, options.threads,
    )  # fmt: skip
    # Not the sizes, presets and budgets: those are in the cells, and a file may gather more of them.
    settings = {
        key: getattr(options, key)
        for key in ("prompt", "output", "requests", "interval", "block_size", "batched_tokens", "eager", "threads")
    }
    settings |= {"model": name, "texts": options.texts.name if options.texts else "random tokens"}
    store = Store(options.json, settings | {"repeats": options.repeats})
    wanted = [(kv, contender) for kv in options.kv_mib for contender in plugins]
    missing = [(kv, contender) for kv, contender in wanted if cell_name(contender, kv) not in store]
    with tempfile.TemporaryDirectory() as scratch:
        if missing and options.texts:
            from transformers import AutoTokenizer

            load = replace(load, prompts=Path(scratch) / "prompts.jsonl")
            files = sorted(options.texts.glob("*.txt"))
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            write_prompts(tokenizer, files, options.prompt, options.requests, load.prompts)
        run_all(load, missing, plugins, options, store, Path(scratch))
    print(f"{name}, {options.requests} requests of {options.prompt} tokens, {options.output} answered\n")
    print(details(store.cells, list(plugins), options.kv_mib) + "\n")
    found = speeds(store.cells, list(plugins), options.kv_mib)
    print(table(found, options.kv_mib))
    if options.picture:
        from analysis.benchmarks.serve_picture import draw

        draw(found, options.picture)


def run_all(
    load: Load, missing: Sequence[tuple[int, str]], plugins: dict[str, Any], options: argparse.Namespace, store: Store,
    scratch: Path,
) -> None:  # fmt: skip
    """Measure what is missing, one server at a time. One that refuses to start is reported and leaves a gap."""
    served_by = server_environment(options.python, options.texts is not None) if missing else {}
    tokens = load.requests * load.output * options.repeats
    for kv_mib, contender in tqdm(missing, file=sys.stderr, unit="server", disable=not missing):
        logs = (options.logs or scratch) / cell_name(contender, kv_mib).replace(" | ", "_").replace(" ", "_")
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        with tqdm(total=tokens, desc=cell_name(contender, kv_mib), file=sys.stderr, unit="tok", leave=False) as bar:
            try:
                cell = measure(load, kv_mib, plugins[contender], options, logs.resolve(), bar)
            except Refused as refusal:
                tqdm.write(f"{cell_name(contender, kv_mib)} did not start: {refusal}", file=sys.stderr)
                continue
        store.add(cell_name(contender, kv_mib), cell | {"served_by": served_by})


if __name__ == "__main__":
    # `timeout` and `kill` send this, and the server must not outlive us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
