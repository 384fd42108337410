"""``centroidkv generate``: any model folder, any text, a compressed cache, streamed output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from centroidkv import presets
from centroidkv.cli.options import SMOLLM2, budget, check_model, load, read_prompt, whole
from centroidkv.errors import CommandError
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.records import Budget

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``centroidkv generate``."""
    parser.add_argument("--model", required=True, help=f"model folder or hub name; '{SMOLLM2}' for the packaged model")
    parser.add_argument("--prompt-file", required=True, type=Path, help="UTF-8 text file with the prompt; - for stdin")
    parser.add_argument("--budget", type=budget, default=Budget.ratio(0.25), help="0.25 = a quarter; 4096 = slots")
    parser.add_argument("--preset", choices=sorted(presets.ALL), default="balanced", help="default: balanced")
    parser.add_argument("--interval", type=whole(1), default=128, help="tokens between two compressions (default 128)")
    parser.add_argument("--max-new-tokens", type=whole(1), default=256, help="default 256")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="default float32")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")


def run(options: argparse.Namespace) -> int:
    """Generate, streaming to stdout; statistics go to stderr.

    Raises:
        CommandError: the prompt is empty or not UTF-8.
        ModelError: there is no such model, it is damaged, or it needs ``--trust-remote-code``.
        BudgetError: the preset cannot work within the budget.
    """
    # Whatever can be refused without the model is refused before it is loaded.
    cache = CentroidCache(presets.ALL[options.preset](options.budget), interval=options.interval)
    check_model(options.model)
    text = read_prompt(options.prompt_file)
    model, tokenizer = load(options.model, DTYPES[options.dtype], trust_remote_code=options.trust_remote_code)
    ids = _encode(tokenizer, text, raw=options.raw)
    if not ids.numel():
        raise CommandError(f"the prompt in {str(options.prompt_file)!r} holds no token of this model")
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
        return torch.tensor([tokenizer(text).input_ids], dtype=torch.long)
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return torch.tensor([tokenizer(chat, add_special_tokens=False).input_ids])
