"""``centroidkv generate``: any model folder, any text, a compressed cache, streamed output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from centroidkv import presets
from centroidkv.integrations.transformers import CentroidCache, enable, load_pretrained, load_smollm2
from centroidkv.records import Budget

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def budget(text: str) -> Budget:
    """A budget from the command line: 0.25 is a ratio, 4096 a number of slots."""
    try:
        return Budget.of(int(text) if text.isdigit() else float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} (0.25 is a quarter of the tokens, 4096 a number of slots)") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``centroidkv generate``."""
    parser.add_argument("--model", required=True, help="model folder or hub name; 'smollm2' for the packaged model")
    parser.add_argument("--prompt-file", required=True, type=Path, help="UTF-8 text file with the prompt; - for stdin")
    parser.add_argument("--budget", type=budget, default=Budget.ratio(0.25), help="0.25 = a quarter; 4096 = slots")
    parser.add_argument("--preset", choices=sorted(presets.ALL), default="balanced", help="default: balanced")
    parser.add_argument("--interval", type=int, default=128, help="tokens between two compressions (default 128)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default 256")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="default float32")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")


def run(options: argparse.Namespace) -> int:
    """Generate, streaming to stdout; statistics go to stderr."""
    path = options.prompt_file
    text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    dtype = DTYPES[options.dtype]
    model, tokenizer = load_smollm2(dtype) if options.model == "smollm2" else load_pretrained(options.model, dtype)
    ids = _encode(tokenizer, text, raw=options.raw)
    cache = CentroidCache(presets.ALL[options.preset](options.budget), interval=options.interval)
    with enable(model):
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    print(cache.stats(), file=sys.stderr)
    return 0


def _encode(tokenizer: Any, text: str, *, raw: bool) -> torch.Tensor:
    if raw or not tokenizer.chat_template:
        return torch.tensor([tokenizer(text).input_ids])
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return torch.tensor([tokenizer(chat, add_special_tokens=False).input_ids])
