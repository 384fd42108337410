"""What analysis.evaluation.decode_quality measures: predictions beside the full cache's, and free-running text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from centroidkv.compressor import Compressor
from centroidkv.errors import EvaluationError
from centroidkv.integrations.transformers import CentroidCache, enable


@dataclass(frozen=True)
class Followed:
    """Per token fed after the prompt: ``kl`` to the full cache, ``top1`` agreement, ``nll`` and ``nll_full``."""

    values: dict[str, Tensor]
    slots: int
    events: int

    def windows(self, key: str, size: int) -> list[float]:
        """Means over consecutive windows of ``size`` tokens."""
        return self.values[key].unflatten(0, (-1, size)).mean(-1).tolist()


def new_cache(model: Any, compressor: Compressor | None, interval: int) -> DynamicCache | CentroidCache:
    """The full cache without a compressor, else one that is clustered every ``interval`` tokens."""
    return DynamicCache(config=model.config) if compressor is None else CentroidCache(compressor, interval)


def attention(model: Any, cache: Any) -> AbstractContextManager[Any]:
    """What must surround a forward pass with this cache: nothing for a full cache, which runs as ever."""
    return enable(model) if isinstance(cache, CentroidCache) else nullcontext()


@torch.no_grad()
def follow(
    model: Any,
    ids: Tensor,
    prompt: int,
    compressors: dict[str, Compressor],
    block: int,
    interval: int,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, Followed]:
    """Feed ``ids [1, prompt + n + 1]`` to the full cache and all others: the prompt, then n tokens, block by block.

    Every cache sees the same tokens, so its predictions of the next ones are comparable at every place. A block
    attends to itself and to what the cache holds, as token by token; it must divide the interval, so that compression
    falls on the same tokens too.

    Raises:
        EvaluationError: blocks that do not divide the interval or the tokens.
    """
    fed = ids.shape[1] - 1 - prompt
    if interval % block or fed % block or fed < 1:
        raise EvaluationError(f"blocks of {block} tokens must divide the interval {interval} and the {fed} tokens fed")
    caches = {name: new_cache(model, made, interval) for name, made in {None: None, **compressors}.items()}
    for cache in caches.values():
        with attention(model, cache):
            model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
    parts: dict[str, list[dict[str, Tensor]]] = {name: [] for name in compressors}
    for start in range(prompt, prompt + fed, block):
        truth = ids[0, start + 1 : start + block + 1]
        full = None
        for name, cache in caches.items():  # the full cache comes first
            with attention(model, cache):
                logits = model(ids[:, start : start + block], past_key_values=cache).logits[0].float()
            if full is None:
                full = logits.log_softmax(-1)
            else:
                parts[name].append(compare(full, logits.log_softmax(-1), truth))
            advance()
    return {
        name: Followed(
            {key: torch.cat([part[key] for part in found]) for key in found[0]},
            caches[name].stats().physical,
            caches[name].stats().events,
        )
        for name, found in parts.items()
    }


def compare(full: Tensor, other: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Two sets of log-probabilities ``[n, V]`` for the true next tokens ``[n]``; KL(full | other) in nats."""
    at = truth[:, None]
    return {
        "kl": (full.exp() * (full - other)).sum(-1),
        "top1": (full.argmax(-1) == other.argmax(-1)).float(),
        "nll": -other.gather(1, at)[:, 0],
        "nll_full": -full.gather(1, at)[:, 0],
    }


@torch.no_grad()
def sampled(
    model: Any,
    prompt: Tensor,
    new: int,
    temperature: float,
    seed: int,
    cache: Any,
    advance: Callable[[], object] = lambda: None,
) -> Tensor:
    """``new`` sampled tokens after ``prompt [1, n]``, ``[new]``, none of which ends the text; seeded."""
    chance = torch.Generator().manual_seed(seed)
    ends = model.generation_config.eos_token_id
    barred = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    tokens: list[Tensor] = []
    fed = prompt
    with attention(model, cache):
        for _ in range(new):
            logits = model(fed, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
            logits[barred] = -torch.inf
            fed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=chance)[None]
            tokens.append(fed[0, 0])
            advance()
    return torch.stack(tokens)


def continuation(
    model: Any, prompt: Tensor, new: int, temperature: float, seed: int, advance: Callable[[], object] = lambda: None
) -> Tensor:
    """The full cache's own sampled continuation, ``[new]``."""
    return sampled(model, prompt, new, temperature, seed, new_cache(model, None, 1), advance)


@torch.no_grad()
def free_run(
    model: Any, prompt: Tensor, compressor: Compressor | None, new: int, temperature: float, seed: int, interval: int
) -> dict[str, Any]:
    """Sample ``new`` tokens over this cache; how much they repeat, and what the full cache makes of them (NLL)."""
    cache = new_cache(model, compressor, interval)
    tokens = sampled(model, prompt, new, temperature, seed, cache)
    whole = torch.cat((prompt, tokens[None]), -1)
    logits = model(whole, use_cache=False, logits_to_keep=new + 1).logits[0, :-1].float()
    listed = tokens.tolist()
    return {
        "distinct_1": distinct(listed, 1),
        "distinct_4": distinct(listed, 4),
        "repeated_8": 1 - distinct(listed, 8),
        "nll": torch.nn.functional.cross_entropy(logits, tokens).item(),
        "ids": listed,
    }


def distinct(tokens: Sequence[int], n: int) -> float:
    """The share of n-grams that did not occur before: 1 without repetition, near 0 in a loop."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    if not grams:
        raise EvaluationError(f"{len(tokens)} tokens hold no {n}-gram; generate more")
    return len(set(grams)) / len(grams)
