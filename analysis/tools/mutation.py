"""Break the package's mathematics one line at a time and see whether the laws notice.

python -m analysis mutation [--only SUBSTRING]

Each mutation replaces one expression in a copy of the package and runs the laws of the family it belongs to (in the ``ci``
profile). A mutation that no law rejects is a survivor; survivors are listed with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from centroidkv.cli.demo import format_table

ROOT = Path(__file__).parents[2]
LAWS = "tests/laws/test_laws.py"
OTHERS = {"theorem": ["tests/partition/test_theorem.py"], "test_blocked": ["tests/rounds/test_blocked.py"]}


@dataclass(frozen=True)
class Mutation:
    """Replace ``old`` by ``new`` in ``file``; the tests selected by ``laws`` should fail. ``excuse``: why they need not."""

    file: str
    old: str
    new: str
    laws: str
    excuse: str = ""


MUTATIONS = (
    Mutation("partition/alternating.py", "torch.arange(size) % 2 == 0", "torch.arange(size) % 3 == 0", "theorem"),
    Mutation("partition/halves.py", "< size // 2", "<= size // 2", "check_partition",
             "still a valid partition, with one more source; the example in tests/partition/test_partition.py pins it"),
    Mutation("partition/strided.py", "& (index != size - 1)", "", "check_partition"),
    Mutation("partition/random_split.py", "generator=torch.Generator().manual_seed(self.seed)", "", "check_partition"),
    Mutation("partition/chunks.py", "torch.arange(full * size, length)", "torch.arange(full * size, length - 1)", "check_partition"),
    Mutation("partition/chunks.py", "    if tail:", "    if tail > 1:", "check_partition"),
    Mutation("similarity/cosine.py", "_unit(a) @ _unit(b).mT", "_unit(a) @ b.mT", "check_similarity"),
    Mutation("similarity/cosine.py", "    x = x / x.abs().amax(-1, keepdim=True).clamp(min=tiny)\n", "", "check_similarity"),
    Mutation("similarity/negative_euclidean.py", "-distance", "distance", "check_similarity"),
    Mutation("similarity/dot.py", "a @ b.mT", "a @ b.mT + a.sum(-1, keepdim=True)", "check_similarity"),
    Mutation("matching/candidates.py", "pairs.max(-1)", "pairs.min(-1)", "check_matcher"),
    Mutation("matching/candidates.py", "descending=True, stable=True)[..., :count]", "stable=True)[..., :count]", "check_matcher"),
    Mutation("matching/candidates.py", "descending=True, stable=True)[..., :count]", "descending=True, stable=True)[..., : count - 1]", "check_matcher"),
    Mutation("matching/candidates.py", "torch.where(chosen, self.target, source)", "torch.where(chosen, self.target + 1, source)", "check_matcher"),
    Mutation("matching/bipartite.py", "total * end // whole", "total * end // (whole + 1)", "check_matcher"),
    Mutation("matching/all_pairs.py", "mutual & (index < choice)", "mutual", "check_matcher"),
    Mutation("matching/kmeans.py", "stays = index == medoid", "stays = index >= medoid", "check_matcher"),
    Mutation("matching/kmeans.py", "(rank < missing) & ~stays", "(rank < missing - 1) & ~stays", "check_matcher"),
    Mutation("aggregate/degree_weighted_mean.py", "state.degree + sum_merges(state.degree, assignment)", "state.degree + sum_merges(state.degree.clamp(max=1), assignment)", "check_aggregator"),
    Mutation("aggregate/segments.py", "degree.flatten()[movers].to(exact)", "degree.flatten()[movers].to(exact).clamp(max=1)", "check_aggregator"),
    Mutation("aggregate/segments.py", "own + sum_of_groups(", "own - sum_of_groups(", "check_aggregator"),
    Mutation("aggregate/segments.py", "share[:, None] * (a - b)", "share[:, None] * a", "check_aggregator"),
    Mutation("aggregate/segments.py", "index_add_(0, which, rows)", "index_copy_(0, which, rows)", "check_aggregator"),
    Mutation("aggregate/keep_target_key.py", "state.degree + sum_merges(state.degree, assignment)", "state.degree", "check_aggregator"),
    Mutation("schedule/linear_annealing.py", "- round_index * Fraction", "+ round_index * Fraction", "check_schedule"),
    Mutation("schedule/sizes.py", "current - target)", "current)", "check_schedule"),
    Mutation("schedule/sizes.py", "capacity(current), ", "", "check_schedule"),
    Mutation("schedule/sizes.py", "math.ceil", "math.floor", "check_schedule"),
    Mutation("preserve/recent.py", "from_the_end <= count", "from_the_end < count", "check_compressor"),
    Mutation("preserve/union.py", "        free &= ~chosen\n", "", "check_compressor"),
    Mutation("dense.py", "torch.where(joined.live, joined.positions, -1)", "-joined.positions", "check_compressor"),
    Mutation("dense.py", "return _stack(parts).rows(back)", "return _stack(parts)", "check_compressor"),
    Mutation("rounds/reference.py", "state.select(order[..., count:])", "state.select(order[..., count - 1 :])", "check_compressor"),
    Mutation("rounds/blocked.py", "level.cumsum(-1) <= count", "level.cumsum(-1) < count", "check_compressor"),
    Mutation("rounds/blocked.py", "which * 2 + 1", "which * 2", "check_compressor"),
    Mutation("rounds/blocked.py", ".mul_(share[part, None])", "", "check_compressor"),
    Mutation("rounds/blocked.py", "landing = changed - torch.searchsorted(movers, changed)", "landing = changed - 1", "check_compressor"),
    Mutation("rounds/blocked.py", "self.free = left - torch.searchsorted(movers, left)", "self.free = left.clamp(max=len(self.origin) - 1)", "check_compressor"),
    Mutation("rounds/scorers.py", "keys[..., 1::2, :] * noted[..., 1::2, None]", "keys[..., 1::2, :]", "test_blocked"),
    Mutation("rounds/scorers.py", ".mul_(a).mul_(b)", ".mul_(a)", "test_blocked"),
    Mutation("compressor.py", "if state.slots <= budget:\n            return state", "if state.slots < budget:\n            return state", "check_compressor",
             "a row exactly at its budget: the plan is empty, so compressing it again changes nothing either"),
    Mutation("attention/reference.py", "degree.to(exact).log()", "degree.to(exact).log1p()", "check_attention"),
    Mutation("attention/reference.py", "place > newest", "place >= newest", "check_attention"),
    Mutation("attention/sdpa.py", "repeat(query_heads // heads, 1)", "repeat_interleave(query_heads // heads, 0)", "check_attention"),
    Mutation("attention/sdpa.py", "degree.to(exact).log()", "degree.to(exact)", "check_attention"),
)  # fmt: skip


def survives(mutation: Mutation, scratch: Path) -> bool:
    """Whether the laws still pass with the mutation applied in ``scratch``, a copy of the project."""
    path = scratch / "centroidkv" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.file} holds {mutation.old!r} {text.count(mutation.old)} times, not once; update the list"
        )
    path.write_text(text.replace(mutation.old, mutation.new))
    tests = OTHERS.get(mutation.laws) or [LAWS, "-k", mutation.laws]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=scratch, env=environment, capture_output=True).returncode == 0
    finally:
        path.write_text(text)


def main() -> int:
    """Run all mutations; the exit status is 1 if one survives without an excuse."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only mutations whose file contains this")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.file]
    start, rows, unexcused = time.perf_counter(), [], 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for part in ("centroidkv", "tests"):
            shutil.copytree(ROOT / part, scratch / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", scratch)
        for mutation in tqdm(chosen, file=sys.stderr, leave=False):
            alive = survives(mutation, scratch)
            unexcused += alive and not mutation.excuse
            verdict = ("survives: " + (mutation.excuse or "NO REASON KNOWN")) if alive else "killed"
            rows.append((mutation.file, f"`{_line(mutation.old)}` -> `{_line(mutation.new)}`", verdict))
    print(format_table(("file", "mutation", "verdict"), rows))
    killed = sum(row[2] == "killed" for row in rows)
    print(f"\n{killed} of {len(rows)} mutations killed in {time.perf_counter() - start:.0f} s")
    return int(unexcused > 0)


def _line(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"


if __name__ == "__main__":
    sys.exit(main())
