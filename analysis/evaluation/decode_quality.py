"""Long decoding and chats over a cache that is clustered again and again, beside the full cache: drift? collapse?

python -m analysis decode_quality [--model smollm2] [--presets ...] [--budgets 0.5 0.25 512] [--json FILE]

After a prompt, every cache is fed the same tokens, block by block, and its predictions are compared with the full
cache's in windows of 256 tokens. ``--source text``: the tokens are real prose. ``--source generate``: they are the full
cache's own sampled continuation. ``--free N``: every cache goes its own way for N sampled tokens, and how much it
repeats itself is counted. ``--chats N``: N chats of a document and six questions over one growing cache. With
``--json`` an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from analysis.evaluation.decode_chat import make_chat, read_chat
from analysis.evaluation.decode_picture import draw
from analysis.evaluation.decode_runs import continuation, follow, free_run
from analysis.tools.store import Store
from centroidkv import presets
from centroidkv.cli.demo import format_table
from centroidkv.cli.generate import DTYPES, budget
from centroidkv.cli.needle import prose
from centroidkv.compressor import Compressor
from centroidkv.errors import EvaluationError
from centroidkv.integrations.transformers import load_named
from centroidkv.records import Budget

SOURCES = ("text", "generate")
FULL = "full cache"


def label(preset: str, size: Budget) -> str:
    """How a method is called in tables and files, such as ``centroidkv 25%`` or ``tome 512 slots``."""
    return f"{preset} {size.amount:.4g} slots" if size.kind == "tokens" else f"{preset} {100 * size.amount:.4g}%"


def methods(names: Sequence[str], budgets: Sequence[Budget]) -> dict[str, Compressor]:
    """A compressor for every preset and budget, by label."""
    return {label(name, size): presets.ALL[name](size) for size in budgets for name in names}


def prompt_and_text(tokenizer: Any, files: Sequence[Path], sample: int, length: int) -> Tensor:
    """The first ``length`` tokens of a sample's text, ``[1, length]``: the given files in turn, else prose."""
    text = files[sample].read_text(encoding="utf-8") if files else prose(sample)
    ids = tokenizer(text).input_ids
    if len(ids) < length:
        raise EvaluationError(f"text {sample} has {len(ids)} tokens, {length} are needed; ask for fewer --tokens")
    return torch.tensor([ids[:length]])


def run_source(source: str, model: Any, tokenizer: Any, options: argparse.Namespace, store: Store) -> None:
    """Feed every cache the same tokens; one cell per sample and method."""
    for sample in range(options.samples):
        wanted = {
            name: made
            for name, made in methods(options.presets, options.budgets).items()
            if f"{source} {sample} | {name}" not in store
        }
        if not wanted:
            continue
        length = options.prompt + options.tokens + 1
        if source == "text":
            ids = prompt_and_text(tokenizer, options.text, sample, length)
        else:
            prompt = prompt_and_text(tokenizer, options.text, sample, options.prompt)
            key = f"generate {sample} | {FULL}"
            if key not in store:
                bar = tqdm(total=options.tokens + 1, file=sys.stderr, leave=False, desc=f"generating text {sample}")
                new = continuation(model, prompt, options.tokens + 1, options.temperature, sample, advance=bar.update)
                bar.close()
                store.add(key, {"ids": new.tolist()})
            ids = torch.cat((prompt, torch.tensor([store[key]["ids"]])), -1)
        steps = options.tokens // options.block * (len(wanted) + 1)
        with tqdm(total=steps, file=sys.stderr, leave=False, desc=f"{source} {sample}") as bar:
            found = follow(model, ids, options.prompt, wanted, options.block, options.interval, bar.update)
        for name, result in found.items():
            windows = {key: result.windows(key, options.window) for key in result.values}
            store.add(f"{source} {sample} | {name}", {**windows, "slots": result.slots, "events": result.events})


def run_alone(kind: str, model: Any, tokenizer: Any, options: argparse.Namespace, store: Store) -> None:
    """Free-running text (``free``) or chats (``chat``): one cell per sample and method, the full cache included."""
    made: dict[str, Compressor | None] = {FULL: None, **methods(options.presets, options.budgets)}
    count = options.samples if kind == "free" else options.chats
    todo = [(name, sample) for sample in range(count) for name in made if f"{kind} {sample} | {name}" not in store]
    for name, sample in tqdm(todo, file=sys.stderr, leave=False, desc=kind):
        if kind == "free":
            prompt = prompt_and_text(tokenizer, options.text, sample, options.prompt)
            cell = free_run(model, prompt, made[name], options.free, options.temperature, sample, options.interval)
        else:
            chat = make_chat(tokenizer, options.document, sample)
            cell = read_chat(model, chat, made[name], options.interval)
        store.add(f"{kind} {sample} | {name}", cell)


def source_rows(store: Store, source: str, names: Sequence[str], samples: int) -> list[list[str]]:
    """Per method: KL of every window, top-1 agreement, NLL beside the full cache's, slots at the end."""
    rows = []
    for name in names:
        cells = [store[f"{source} {sample} | {name}"] for sample in range(samples)]
        kl = [mean(values) for values in zip(*(cell["kl"] for cell in cells), strict=True)]
        rest = [mean(mean(cell[key]) for cell in cells) for key in ("top1", "nll", "nll_full")]
        slots = f"{mean(cell['slots'] for cell in cells):.0f}"
        rows.append([name, *(f"{x:.4f}" for x in kl), f"{rest[0]:.1%}", f"{rest[1]:.3f}", f"{rest[2]:.3f}", slots])
    return rows


def alone_rows(store: Store, kind: str, keys: Sequence[str], names: Sequence[str], samples: int) -> list[list[str]]:
    """Per method: the means of the given measures over samples."""
    return [
        [name, *(f"{mean(store[f'{kind} {sample} | {name}'][key] for sample in range(samples)):.3f}" for key in keys)]
        for name in (FULL, *names)
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked against one another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m or a model folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument(
        "--presets", nargs="+", choices=sorted(presets.ALL), default=["centroidkv", "distinctive", "streaming_llm"]
    )
    parser.add_argument("--budgets", nargs="+", type=budget, default=[budget("0.5"), budget("0.25")])
    parser.add_argument("--source", nargs="*", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="a file per sample (default: library prose)")
    parser.add_argument("--samples", type=int, default=1, help="texts per source, and free runs")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens fed after the prompt")
    parser.add_argument("--window", type=int, default=256, help="tokens per figure over time")
    parser.add_argument("--block", type=int, default=32, help="tokens fed at once; divides --interval")
    parser.add_argument("--interval", type=int, default=128, help="tokens between two compressions")
    parser.add_argument("--temperature", type=float, default=0.8, help="of sampling")
    parser.add_argument("--free", type=int, default=512, help="tokens of free-running generation; 0 for none")
    parser.add_argument("--chats", type=int, default=2, help="0 for none")
    parser.add_argument("--document", type=int, default=1200, help="tokens of a chat's document")
    parser.add_argument("--json", type=Path, help="results, with versions and commit; an interrupted run goes on here")
    parser.add_argument("--picture", type=Path, help="where to draw KL and NLL over time")
    options = parser.parse_args(arguments)
    if options.interval % options.block or options.tokens % options.block:
        parser.error("--block must divide --interval and --tokens, so that compression falls where it would")
    if options.tokens % options.window:
        parser.error("--window must divide --tokens")
    if options.text and len(options.text) != options.samples:
        parser.error(f"--text names {len(options.text)} files for {options.samples} --samples")
    if options.picture and not options.source:
        parser.error("--picture draws what --source measures; name a source")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked and not yet stored; draw; print the tables."""
    options = parse(arguments)
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    kept = ("dtype", "prompt", "tokens", "window", "block", "interval", "temperature", "free", "document")
    settings: dict[str, Any] = {name: getattr(options, name) for name in kept}
    settings |= {"model": Path(options.model).name, "text": [file.name for file in options.text] or "prose"}
    store = Store(options.json, settings)
    model, tokenizer = load_named(options.model, DTYPES[options.dtype])
    names = list(methods(options.presets, options.budgets))
    for source in options.source:
        run_source(source, model, tokenizer, options, store)
    if options.free:
        run_alone("free", model, tokenizer, options, store)
    if options.chats:
        run_alone("chat", model, tokenizer, options, store)
    print(
        f"{settings['model']}, {options.dtype}; prompt of {options.prompt} tokens, then {options.tokens}, "
        f"clustered every {options.interval}"
    )
    for source in options.source:
        print(f"\nsource {source}, {options.samples} sample(s): KL to the full cache in windows of {options.window}\n")
        ends = [str((i + 1) * options.window) for i in range(options.tokens // options.window)]
        header = ("method", *(f"KL ..{end}" for end in ends), "top-1", "NLL", "NLL full", "slots")
        print(format_table(header, source_rows(store, source, names, options.samples)))
    if options.free:
        print(f"\nfree-running, {options.free} tokens, {options.samples} sample(s)\n")
        header = ("method", "distinct 1-grams", "distinct 4-grams", "repeated 8-grams", "NLL under the full cache")
        keys = ("distinct_1", "distinct_4", "repeated_8", "nll")
        print(format_table(header, alone_rows(store, "free", keys, names, options.samples)))
    if options.chats:
        print(f"\n{options.chats} chat(s), document of about {options.document} tokens, six questions each\n")
        keys = ("nll", "exact", "tokens", "slots")
        header = ("method", "NLL of answers", "exact", "tokens", "slots at the end")
        print(format_table(header, alone_rows(store, "chat", keys, names, options.chats)))
    if options.picture:
        chosen = [label("", size).strip() for size in options.budgets]
        draw(store, options.source, options.presets, chosen, options.samples, options.window, options.picture)


if __name__ == "__main__":
    main()
