"""Random cases: which subject, with which options, and what happens to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.fuzz.back_ends import BackEnds
from tools.fuzz.cached import GRADS, MASKS_4D
from tools.fuzz.life import ERRORS, PLACES, Life
from tools.fuzz.models import FAMILIES
from tools.fuzz.pool import Pool
from tools.fuzz.recipe import MATCHINGS, SCHEDULES, SIMILARITIES, SPLITS, STORAGES, make_compressor

Operation = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One subject's life: enough to live it again."""

    subject: str
    options: dict[str, Any] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()


def draw(random: Random, subjects: tuple[str, ...] = ("life", "pool", "back_ends")) -> Case:
    """A case of one of ``subjects``."""
    weights = [{"life": 6, "pool": 2, "back_ends": 3}[subject] for subject in subjects]
    subject = random.choices(subjects, weights)[0]
    options, operations = SUBJECTS[subject][1](random)
    usual = _defaults(*SUBJECTS[subject][0].__mro__[:-1], make_compressor)
    options = {k: v for k, v in options.items() if v is not None and (k not in usual or usual[k] != v)}
    kept = [(name, {k: v for k, v in given.items() if v is not None}) for name, given in operations]
    return Case(subject, options, tuple(kept))


def _defaults(*makers: Any) -> dict[str, Any]:
    """What options are if nothing is said."""
    parameters = [p for maker in makers for p in inspect.signature(maker).parameters.values()]
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _maybe(random: Random, share: float, value: Any, otherwise: Any = None) -> Any:
    return value if random.random() < share else otherwise


def _recipe(random: Random, presets: tuple[str, ...]) -> dict[str, Any]:
    budget: float | int = random.choice([0.1, 0.25, 0.4, 0.5, 0.75, 0.9, 1.0, 8, 12, 20, 32, 64])
    if random.random() < 0.3:
        return {"preset": random.choice(presets), "budget": random.choice([budget, 80, 100])}
    return {
        "budget": budget,
        "sinks": random.choice([0, 1, 1, 4]),
        "recent": random.choice([0, 1, 4, 4, 8]),
        "chunk": random.choice([2, 3, 7, 16, 16, 32]),
        "split": _maybe(random, 0.3, random.choice(list(SPLITS))),
        "similarity": _maybe(random, 0.3, random.choice(list(SIMILARITIES))),
        "matching": _maybe(random, 0.4, random.choice(list(MATCHINGS))),
        "schedule": _maybe(random, 0.5, random.choice(list(SCHEDULES))),
        "distinctive": _maybe(random, 0.3, random.choice(["leverage", "passages", "cosine", "low_norm"])),
    }


PRESETS = ("balanced", "centroidkv", "quick", "distinctive", "tome", "kmeans", "streaming_llm", "keydiff", "knorm")


def _life(random: Random) -> tuple[dict[str, Any], list[Operation]]:
    recipe = _recipe(random, PRESETS)
    # One of the presets for real lengths needs prompts to match.
    long = "preset" in recipe
    fixed = random.random() < 0.12
    if fixed:
        recipe["budget"] = random.choice([12, 20, 32, 100])
    interval = random.choice([1, 2, 4, 8, 8, 16, 64])
    kv_heads = random.choice([1, 2, 2, 4])
    options = {
        "family": random.choice([*FAMILIES, "llama", "llama", "gemma3"]),
        "layers": random.choice([1, 1, 2, 2, 3]),
        "kv_heads": kv_heads,
        "attention": random.choice(["sdpa", "sdpa", "eager"]),
        "enabled": random.random() < 0.7,
        "dtype": random.choice(["float32"] * 4 + ["bfloat16", "float16"]),
        "autocast": _maybe(random, 0.12, random.choice(["bfloat16", "float16"])),
        "text": random.choice(["random"] * 4 + ["repeat", "equal"]),
        "batch": random.choice([1, 1, 1, 2, 2, 3]),
        "interval": interval,
        "storage": _maybe(random, 0.3, random.choice([s for s in STORAGES if s])) if not fixed else None,
        "capacity": "fixed" if fixed else None,
        "named": _maybe(random, 0.2, True),
        "alone": _maybe(random, 0.4, True),
        "seed": random.randrange(1000),
        **recipe,
    }
    if options["autocast"]:
        options["dtype"] = "float32"
    edges = [1, 2, recipe.get("chunk", 16), recipe.get("chunk", 16) + 1, max(recipe.get("chunk", 16) - 1, 1)]
    sizes = [*edges, interval, interval + 1, 0, random.randint(1, 40), random.randint(1, 160 if long else 60)]
    padding = random.choice([None, None, None, "left", "right", "inside"])
    operations: list[Operation] = []
    grad = random.choice(["no_grad"] * 4 + ["inference", "mixed"])

    def feed(n: int, mask: str | None = None) -> Operation:
        more: dict[str, Any] = {}
        if mask in ("left", "right", "inside"):
            more = {"pad": tuple(random.randint(0, max(n, 1)) for _ in range(options["batch"]))}
        elif mask in MASKS_4D:
            more = {"wide": random.random() < 0.5, "additive": random.random() < 0.5}
        mode = random.choice(list(GRADS)) if grad == "mixed" else grad
        if mode == "grad" and random.random() < 0.7:
            mode = "no_grad"
        return "feed", {
            "n": n,
            "mask": mask,
            **more,
            "grad": mode if mode != "no_grad" else None,
            "explicit": _maybe(random, 0.2, True),
            "cast": _maybe(random, 0.1, False),
        }

    operations.append(feed(random.randint(1, 200 if long else 80), padding))
    for _ in range(random.randint(2, 14)):
        operations.extend(_happening(random, feed, sizes, padding, options["layers"]))
    return options, operations


def _happening(random: Random, feed: Callable[..., Operation], sizes: list[int], padding: Any, layers: int) -> Any:
    kind = random.choices(
        ["decode", "chunk", "padded", "mask", "crop", "assist", "rows", "copy", "save", "reset", "switch", "batch",
         "interrupt", "leave", "neighbour"],
        [30, 14, 8 if padding else 0, 6, 6, 4, 6, 3, 3, 1, 3, 1, 8, 2, 3],
    )[0]  # fmt: skip
    place = {"n": random.choice([1, 1, 3, 9]), "where": random.choice(PLACES), "at": random.randrange(layers + 1)}
    if kind == "decode":
        return [feed(1) for _ in range(random.randint(1, 8))]
    if kind in ("chunk", "padded"):
        return [feed(random.choice(sizes), padding if kind == "padded" else random.choice([None, None, "ones"]))]
    if kind == "mask":
        return [feed(random.choice([1, 2, 5, 17]), random.choice(MASKS_4D))]
    if kind == "crop":
        return [("crop", {"tokens": random.choice([0, 1, 1, 2, 3, 5, 20])})]
    if kind == "assist":
        return [("record", {}), feed(random.choice([2, 5])), ("crop", {"tokens": random.choice([1, 2])}), feed(1)]
    if kind == "rows":
        rows = tuple(random.randrange(3) for _ in range(random.randint(1, 4)))
        return [("reorder", {"rows": rows, "how": random.choice(["reorder", "reorder", "select", "repeat"])})]
    if kind == "copy":
        return [("copy", {"go_on_with": random.choice(["copy", "original"])})]
    if kind == "batch":
        return [("wrong_batch", {"batch": random.choice([1, 2, 3])})]
    if kind == "interrupt":
        return [("interrupt", {**place, "error": random.choice(list(ERRORS))}), feed(1)]
    if kind == "leave":
        place["where"] = random.choice(["attention", "append", "handed"])
        return [("leave", {**place, "alone": random.random() < 0.3})]
    if kind == "neighbour":
        place["where"] = random.choice(["attention", "append"])
        return [("neighbour", {**place, "tokens": random.choice([3, 20, 40]), "enabled": random.random() < 0.7,
                               "stays": random.random() < 0.3})]  # fmt: skip
    return [(kind, {})]


def _pool(random: Random) -> tuple[dict[str, Any], list[Operation]]:
    options = {
        "preset": random.choice(["centroidkv", "centroidkv", "quick", "distinctive", "streaming_llm"]),
        "budget": random.choice([0.1, 0.25, 0.5, 0.75, 32, 64, 100]),
        "interval": random.choice([1, 5, 16, 32, 50, 64]),
        "sinks": random.choice([0, 1, 1, 4]),
        "recent": random.choice([0, 1, 4, 8]),
        "block": random.choice([8, 16, 16, 32]),
        "heads": random.choice([1, 2, 3]),
        "groups": random.choice([1, 2, 3]),
        "size": random.choice([8, 16, 32]),
        "value_size": _maybe(random, 0.2, random.choice([4, 16])),
        "dtype": random.choice(["float32", "float32", "bfloat16", "float16"]),
        "text": random.choice(["gaussian", "gaussian", "rotary", "duplicates", "runs", "equal", "ties"]),
        "seed": random.randrange(1000),
    }
    prompt = random.randint(1, 200)
    operations: list[Operation] = [("request", {"prompt": prompt}), ("step", {"new": (random.choice([prompt, 50]),)})]
    for _ in range(random.randint(3, 20)):
        kind = random.choices(["request", "preempt", "end", "step", "steps"], [3, 2, 1, 8, 4])[0]
        if kind == "request":
            operations.append(("request", {"prompt": random.choice([1, 15, 16, 17, random.randint(1, 250)])}))
            if random.random() < 0.5:  # all of a prompt at once
                operations.append(("step", {"new": (0,) * random.randint(0, 2) + (250,)}))
        elif kind in ("preempt", "end"):
            operations.append((kind, {"which": random.randrange(5)}))
        elif kind == "steps":
            operations.extend(("step", {"new": (1,)}) for _ in range(random.randint(1, 8)))
        else:
            sizes = tuple(random.choice([0, 1, 1, 16, 17, random.randint(1, 120)]) for _ in range(random.randint(1, 4)))
            operations.append(("step", {"new": sizes}))
    return options, operations


TEXTS = ("gaussian", "ties", "duplicates", "zeros", "extreme", "runs", "rotary", "equal", "low rank")


def _back_ends(random: Random) -> tuple[dict[str, Any], list[Operation]]:
    recipe = _recipe(random, ("centroidkv", "quick", "distinctive", "balanced"))
    recipe.pop("budget")
    factors = [1.0] * 6 + [0.0, 1e-30, 1e-12, 1e4, 1e18, 1e30, -0.5, -0.6, -0.99, -1.0]
    options = {
        "slots": random.choice([1, 2, 3, 17, random.randint(1, 60), random.randint(60, 400)]),
        "text": random.choice(TEXTS),
        "batch": random.choice([1, 1, 2]),
        "heads": random.choice([1, 1, 2, 3]),
        "size": random.choice([2, 3, 8, 16, 33, 64]),
        "value_size": _maybe(random, 0.3, random.choice([1, 3, 40])),
        "dtype": random.choice(["float32"] * 3 + ["bfloat16", "float16", "float64"]),
        "pad": _maybe(random, 0.2, random.randint(1, 20)),
        "key_factor": random.choice(factors),
        "value_factor": random.choice(factors),
        "merged": _maybe(random, 0.4, True),
        "seed": random.randrange(1000),
        **recipe,
    }
    budgets = [random.choice([0.1, 0.25, 0.5, 0.9, 1, 5, 12, 100]) for _ in range(random.randint(1, 3))]
    operations: list[Operation] = [("compress", {"budget": budget}) for budget in budgets]
    if random.random() < 0.15:
        operations.insert(0, ("beside", {}))
    return options, operations


SUBJECTS: dict[str, tuple[type, Callable[[Random], tuple[dict[str, Any], list[Operation]]]]] = {
    "life": (Life, _life),
    "pool": (Pool, _pool),
    "back_ends": (BackEnds, _back_ends),
}
"""Per name: the class, and how a case of it is drawn."""
