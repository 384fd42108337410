"""How many bytes the Triton kernels read and write: by formula, counted, and the least possible.

python -m analysis kernel_bytes [--json FILE]

Counted by Triton's interpreter on one small head: every address that a program loads or stores. "read" are distinct
addresses, which memory must deliver once; "asked" also counts what is asked for again, which a cache delivers. The
least is every row that is needed read once and every row of the result written once. Who joins whom is sorted by
PyTorch before the merge kernel runs, which is not counted. The last columns scale the formula to Llama-3.1-8B (32
layers, 8 KV heads of 128 bfloat16 numbers) and 128k tokens, at 4.3 TB/s: no kernel that moves these bytes is faster
there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.tools.store import environment, write_json
from centroidkv.errors import BackendError
from centroidkv.kernels import INTERPRET

BYTES_PER_SECOND = 4.3e12
LAYERS = 32


@dataclass(frozen=True)
class Shape:
    """A layer's cache and a round: KV heads, slots, key and value size, bytes per number, chunk, slots that leave."""

    heads: int
    slots: int
    size: int = 128
    item: int = 2
    chunk: int = 256
    removed_share: float = 0.25

    @property
    def left(self) -> int:
        """Slots after the round."""
        return self.slots - int(self.slots * self.removed_share)

    @property
    def row(self) -> int:
        """Bytes of one key, or of one value."""
        return self.size * self.item


SMALL = Shape(heads=1, slots=512)
LLAMA = Shape(heads=8, slots=131072)


@dataclass(frozen=True)
class Traffic:
    """Bytes: asked for, of these from distinct addresses, written; and the least that could be read and written."""

    asked: int
    read: int
    written: int
    least: int


@dataclass(frozen=True)
class Kernel:
    """One line of the table: ``run`` calls the kernel on random tensors of a shape, ``formula`` says what it moves."""

    name: str
    run: Callable[[Shape], object]
    formula: Callable[[Shape], Traffic]


POSITION, DEGREE, PLACE = 8, 4, 4  # bytes


def matching_traffic(shape: Shape) -> Traffic:
    """Keys once (a tile holds the sources of a chunk of 256; of longer chunks, each tile reads all targets)."""
    sources = shape.heads * shape.slots // 2
    tiles = math.ceil(shape.chunk / 256)
    read, written = 2 * sources * shape.row, sources * (4 + 8)
    return Traffic((1 + tiles) * sources * shape.row, read, written, read + written)


def merge_traffic(shape: Shape) -> Traffic:
    """Every slot once, and who joins whom: a place per member; itself, first and last place per slot that stays.

    Places of members and degrees of those that leave are asked for twice: first for the whole mass, then for shares.
    """
    slots, left = shape.heads * shape.slots, shape.heads * shape.left
    needed = slots * (2 * shape.row + DEGREE) + left * POSITION
    written = left * (2 * shape.row + DEGREE + POSITION)
    read = needed + (slots + 3 * left) * PLACE
    asked = read + slots * PLACE + (slots - left) * DEGREE
    return Traffic(asked, read, written, needed + written)


def round_traffic(shape: Shape) -> Traffic:
    """Every slot once, keys and sources' degrees asked for once more to merge them; where each chunk begins."""
    slots, left = shape.heads * shape.slots, shape.heads * shape.left
    needed = slots * (2 * shape.row + DEGREE) + left * POSITION
    written = left * (2 * shape.row + DEGREE + POSITION)
    chunks = math.ceil(shape.slots / shape.chunk)
    asked = needed + slots * shape.row + slots // 2 * DEGREE + 2 * shape.heads * chunks * PLACE
    return Traffic(asked, needed + (chunks + 1) * PLACE, written, needed + written)


def run_matching(shape: Shape) -> object:
    """The best target of every source."""
    from centroidkv.matching.triton import best_targets_triton

    return best_targets_triton(_tensors(shape)[0], shape.chunk)


def run_merge(shape: Shape) -> object:
    """The first sources join the targets behind them."""
    from centroidkv.aggregate.triton import merge_triton

    joins = torch.arange(shape.slots)
    leaving = torch.arange(0, 2 * (shape.slots - shape.left), 2)
    joins[leaving] += 1
    return merge_triton(*_tensors(shape), joins.expand(1, shape.heads, -1))


def run_round(shape: Shape) -> object:
    """As many slots leave every chunk."""
    from centroidkv.rounds.triton import fused_round_triton

    chunks = shape.slots // shape.chunk
    return fused_round_triton(*_tensors(shape), shape.chunk, [(shape.slots - shape.left) // chunks] * chunks)


def _tensors(shape: Shape) -> tuple[torch.Tensor, ...]:
    full = (1, shape.heads, shape.slots)
    rows = (torch.randn(*full, shape.size).bfloat16() for _ in range(2))
    return *rows, torch.ones(full), torch.arange(shape.slots).expand(full).contiguous()


KERNELS = (
    Kernel("matching", run_matching, matching_traffic),
    Kernel("merge", run_merge, merge_traffic),
    Kernel("round", run_round, round_traffic),
)


@dataclass
class Counter:
    """Addresses that kernels touched while :func:`counting`, each with its width in bytes."""

    loads: list[tuple[np.ndarray, int]] = field(default_factory=list)
    stores: list[tuple[np.ndarray, int]] = field(default_factory=list)

    @property
    def asked(self) -> int:
        """Bytes of all loads."""
        return sum(addresses.size * width for addresses, width in self.loads)

    @property
    def read(self) -> int:
        """Bytes of distinct loads."""
        return _distinct(self.loads)

    @property
    def stored(self) -> int:
        """Bytes of all stores."""
        return sum(addresses.size * width for addresses, width in self.stores)

    @property
    def written(self) -> int:
        """Bytes of distinct stores."""
        return _distinct(self.stores)


def _distinct(touched: list[tuple[np.ndarray, int]]) -> int:
    widths = {width for _, width in touched}
    return sum(np.unique(np.concatenate([a for a, w in touched if w == width])).size * width for width in widths)


@contextmanager
def counting() -> Iterator[Counter]:
    """Count what kernels load and store inside the block.

    Raises:
        BackendError: kernels are not interpreted in this process.
    """
    if os.environ.get(INTERPRET) != "1":
        raise BackendError(f"bytes are counted by Triton's interpreter; set {INTERPRET}=1 before the process starts")
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    load, store, counter = builder.create_masked_load, builder.create_masked_store, Counter()

    def touched(pointers: Any, mask: Any) -> tuple[np.ndarray, int]:
        return pointers.data[mask.data.astype(bool)].ravel(), pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        counter.loads.append(touched(pointers, mask))
        return load(pointers, mask, *rest)

    def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counter.stores.append(touched(pointers, mask))
        return store(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        yield counter
    finally:
        del builder.create_masked_load, builder.create_masked_store


def measure(kernel: Kernel, shape: Shape = SMALL) -> Counter:
    """What ``kernel`` loads and stores."""
    with counting() as counter:
        kernel.run(shape)
    return counter


def main() -> None:
    """Count, and print the table."""
    os.environ.setdefault(INTERPRET, "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, cells = [], []
    for kernel in KERNELS:
        counter, formula, llama = measure(kernel), kernel.formula(SMALL), kernel.formula(LLAMA)
        moved, least = (LAYERS * number for number in (llama.read + llama.written, llama.least))
        milliseconds = 1e3 * moved / BYTES_PER_SECOND
        counted = Traffic(counter.asked, counter.read, counter.written, formula.least)
        cells.append(
            {"kernel": kernel.name, "formula": asdict(formula), "counted": asdict(counted), "llama_bytes": moved,
             "llama_least_bytes": least, "llama_ms": milliseconds}
        )  # fmt: skip
        rows.append(
            (
                kernel.name,
                *(f"{a} / {b}" for a, b in ((formula.asked, counted.asked), (formula.read, counted.read))),
                f"{formula.written} / {counted.written}",
                f"{(counted.asked + counted.written) / formula.least:.3f}",
                f"{(counted.read + counted.written) / formula.least:.3f}",
                f"{moved / 1e9:.1f}",
                f"{milliseconds:.2f}",
            )
        )
    versions = {**environment(), "triton": version("triton")}
    from centroidkv.cli.demo import format_table  # which imports transformers

    print(json.dumps(versions) + "\n")
    print(f"counted: {SMALL}\nscaled: {LAYERS} layers of {LLAMA}, {BYTES_PER_SECOND / 1e12} TB/s\n")
    header = (
        "kernel", "asked: formula / counted", "read: formula / counted", "written: formula / counted",
        "asked / least", "read / least", "Llama GB", "Llama ms",
    )  # fmt: skip
    print(format_table(header, rows))
    if options.json:
        shapes = {
            "small": asdict(SMALL),
            "llama": asdict(LLAMA),
            "layers": LAYERS,
            "bytes_per_second": BYTES_PER_SECOND,
        }
        write_json(options.json, {"environment": versions, **shapes, "kernels": cells})


if __name__ == "__main__":
    main()
