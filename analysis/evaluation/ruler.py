"""RULER without a network: eleven of its tasks, several compressors, both protocols, lm-eval's prompts and scoring.

python -m analysis ruler [--model FOLDER] [--presets full distinctive ...] [--budgets 0.5 0.25] [--length 1024]
    [--samples 10] [--protocols query-aware query-agnostic] [--tasks ...] [--essays FOLDER] [--plain-prompt]
    [--output FILE]

Results are written to --output after every cell (method, protocol, task); the same command goes on where it stopped.
The tables are printed last, one per protocol: RULER's score x 100 of each task, their mean, and the mean negative
log-likelihood of the right answers in nats per token, teacher-forced through the same compressed cache; and the bytes
that the caches held, as a share of the full ones.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from analysis.tools.store import Store
from centroidkv import presets
from centroidkv.cli.demo import format_table
from centroidkv.cli.generate import DTYPES, budget
from centroidkv.integrations.lm_eval import CentroidLM
from centroidkv.integrations.transformers import load_pretrained
from centroidkv.integrations.transformers.models import smollm2_folder

SYNTHETIC = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
"""Tasks made from nothing but random words and numbers."""
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
"""Tasks whose haystack is prose: --essays stands in for the essays that lm-eval downloads."""
PROTOCOLS = ("query-aware", "query-agnostic")
SEED = 1234
PACKAGES = ("lm-eval", "wonderwords", "nltk", "datasets")


@contextmanager
def essays_from(folder: Path) -> Iterator[None]:
    """Within it, RULER's essay tasks take their prose from the ``.txt`` files of ``folder``, sorted by name.

    The seam is lm-eval's one essay loader, ``get_haystack``: it asks the library ``datasets`` for the essays and keeps
    them; here it is handed our text, and forgets it again at the end. Sentences, where needles go, are cut after ``.``,
    ``!`` or ``?`` and a space, because NLTK's model for that is a download too. Scores are therefore close to RULER's
    own but not the same numbers.

    Raises:
        FileNotFoundError: the folder is absent or holds no ``.txt`` file.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .txt file; the essay tasks need a folder of prose: --essays FOLDER")
    texts = [path.read_text(encoding="utf-8") for path in files]
    from lm_eval.tasks.ruler import prepare_niah

    before = prepare_niah.datasets, prepare_niah.cached_sent_tokenize
    # Only load_dataset is reached from prepare_niah while samples are made.
    prepare_niah.datasets = SimpleNamespace(load_dataset=lambda *args, **kwargs: {"text": texts})
    prepare_niah.cached_sent_tokenize = lambda text: re.split(r"(?<=[.!?]) +", text)
    prepare_niah.get_haystack.cache_clear()
    try:
        yield
    finally:
        prepare_niah.datasets, prepare_niah.cached_sent_tokenize = before
        prepare_niah.get_haystack.cache_clear()


def build_task(name: str, folder: str, length: int, essays: Path | None) -> Any:
    """lm-eval's task ``name`` with its samples of ``length`` tokens of ``folder``'s tokenizer: the same each time."""
    from lm_eval.tasks import TaskManager

    random.seed(SEED)
    np.random.seed(SEED)
    with redirect_stdout(sys.stderr):  # the generators print their progress
        if name not in ESSAYS:
            return TaskManager(metadata={"pretrained": folder, "max_seq_lengths": [length]}).load([name])["tasks"][name]
        if essays is None:
            raise FileNotFoundError(f"task {name} needs prose: --essays FOLDER")
        with essays_from(essays):
            return TaskManager(metadata={"pretrained": folder, "max_seq_lengths": [length]}).load([name])["tasks"][name]


def run_task(lm: CentroidLM, task: Any, length: int, samples: int, chat: bool) -> dict[str, Any]:
    """One cell: RULER's scores and the answers' NLLs, sample by sample.

    The answer that is scored is the references joined by commas, after the prompt and its answer prefix.
    """
    from lm_eval.api.instance import Instance

    task.build_all_requests(
        limit=samples,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        chat_template=lm.apply_chat_template if chat else None,
        tokenizer_name=lm.tokenizer_name if chat else "",
    )
    requests = task.instances
    texts = lm.generate_until(requests, disable_tqdm=True)
    scores = [task.process_results(r.doc, [text])[str(length)] for r, text in zip(requests, texts, strict=True)]
    answers = [" " + ", ".join(request.doc["outputs"]) for request in requests]
    teacher = [
        Instance("loglikelihood", r.doc, (r.args[0], answer), 0, (r.task_name, r.doc_id, 1))
        for r, answer in zip(requests, answers, strict=True)
    ]
    # _encode_pair tells how many tokens were scored: the log-likelihood is their sum.
    sizes = [len(lm._encode_pair(*request.args)[1]) for request in teacher]
    found = lm.loglikelihood(teacher, disable_tqdm=True)
    nll = [-total / size for (total, _), size in zip(found, sizes, strict=True)]
    return {"scores": scores, "nll": nll, "texts": texts, "tally": lm.tally.as_dict()}


def methods(names: Sequence[str], budgets: Sequence[Any]) -> list[dict[str, Any]]:
    """The model options of every row of a table, the plain model once."""
    rows: list[dict[str, Any]] = [{"preset": "full"}] if "full" in names else []
    return rows + [{"preset": name, "budget": b} for name in names if name != "full" for b in budgets]


def cell_key(options: dict[str, Any], protocol: str, task: str) -> str:
    """Where a cell stands in the result file. The plain model's is the same in both protocols."""
    label = "full" if options["preset"] == "full" else f"{options['preset']} {options['budget'].amount}"
    return " | ".join((label, "both" if label == "full" else protocol, task))


def table(cells: Store, rows: list[dict[str, Any]], protocol: str, tasks: Sequence[str]) -> str:
    """One protocol's table: the score of each task, their mean, the mean NLL, the share of bytes kept."""
    lines = []
    for options in rows:
        own = [cells[cell_key(options, protocol, task)] for task in tasks]
        means = [100 * float(np.mean(cell["scores"])) for cell in own]
        kept = float(np.mean([cell["tally"]["kept_bytes_share"] for cell in own]))
        label = cell_key(options, protocol, "").split(" | ")[0]
        nll = f"{np.mean([np.mean(cell['nll']) for cell in own]):.3f}"
        lines.append((label, *(f"{mean:.0f}" for mean in means), f"{np.mean(means):.1f}", nll, f"{kept:.1%}"))
    short = [task.removeprefix("ruler_").removeprefix("niah_") for task in tasks]
    return format_table(("method", *short, "mean", "NLL", "bytes"), lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; default: SmolLM2-135M-Instruct from its package")
    parser.add_argument("--presets", nargs="+", default=["full", "distinctive", "centroidkv", "streaming_llm"])
    parser.add_argument("--budgets", type=budget, nargs="+", default=[budget("0.5"), budget("0.25")])
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--tasks", nargs="+", choices=SYNTHETIC + ESSAYS, help="default: all that have their data")
    parser.add_argument("--essays", type=Path, help="folder of .txt files, prose for the essay tasks")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample, its answer included")
    parser.add_argument("--samples", type=int, default=10, help="samples per task, of 500")
    parser.add_argument("--plain-prompt", action="store_true", help="no chat template")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("ruler.json"))
    options = parser.parse_args(arguments)
    if unknown := set(options.presets) - {"full", *presets.ALL}:
        parser.error(f"no preset is named {sorted(unknown)}; there are full, {', '.join(presets.ALL)}")
    if options.tasks is None:
        options.tasks = [*SYNTHETIC, *(ESSAYS if options.essays else ())]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every cell that has no result yet, then print the tables."""
    options = parse(arguments)
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    folder = options.model or str(smollm2_folder())
    settings = {
        "model": Path(folder).name,
        "dtype": options.dtype,
        "length": options.length,
        "samples": options.samples,
        "chat": not options.plain_prompt,
        "seed": SEED,
        "essays": sorted(path.name for path in options.essays.glob("*.txt")) if options.essays else None,
    }
    cells = Store(options.output, settings)
    rows = methods(options.presets, options.budgets)
    wanted = {cell_key(r, p, task): (r, p, task) for task in options.tasks for r in rows for p in options.protocols}
    missing = [key for key in wanted if key not in cells]
    model, tokenizer = load_pretrained(folder, DTYPES[options.dtype]) if missing else (None, None)
    built: dict[str, Any] = {}
    for key in (bar := tqdm(missing, file=sys.stderr)):
        row, protocol, name = wanted[key]
        bar.set_description(key)
        if name not in built:
            built = {name: build_task(name, folder, options.length, options.essays)}  # cells come task by task
        lm = CentroidLM(model, tokenizer=tokenizer, protocol=protocol, batch_size=options.batch_size, **row)
        cell = run_task(lm, built[name], options.length, options.samples, not options.plain_prompt)
        versions = {package: version(package) for package in PACKAGES}
        cells.add(key, {**cell, "versions": versions, "options": lm.options.as_dict()})
    commits = sorted({cells[key]["environment"]["commit"] for key in wanted})
    print(
        f"{settings['model']}, {options.dtype}, {torch.get_num_threads()} threads; RULER at {options.length} tokens, "
        f"{options.samples} samples a task, {'no ' if options.plain_prompt else ''}chat template; commit "
        f"{', '.join(commits)}"
    )
    for protocol in options.protocols:
        print(f"\n{protocol}\n\n{table(cells, rows, protocol, options.tasks)}")


if __name__ == "__main__":
    main()
