"""The sweep's outcomes as a page of the docs, and that page read back."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from pathlib import Path

from sweep_families import Family
from sweep_run import ATTENTIONS, COMPRESSORS, Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
COMMAND = "python tests/integrations/sweep.py --write docs/families.md"
CELLS = tuple((attention, enabled) for attention in ATTENTIONS for enabled in (True, False))
HEADINGS = tuple(f"{attention}, {'`enable`' if enabled else 'cache alone'}" for attention, enabled in CELLS)
PARTS = (
    ("alone", "Decoders", "model type"),
    ("pair", "Encoder-decoder models, given `EncoderDecoderCache(CentroidCache(...), DynamicCache())`", "model type"),
    ("bare", "Encoder-decoder models, given a CentroidCache alone", "model type"),
)
SHORT = {"not there": "-", "not run": "not run here"}


NAMES = (
    (r"\b(layer|last|first|layers|has) \d+\b", r"\1 N"),
    (r"\blayers \[[\d, ]+\]", "layers [...]"),
    (r"\b([a-z_]+)=\d+", r"\1=N"),
    (r"\b(this|the) '[^']+' model", r"\1 '...' model"),
    (r"\b[A-Z]\w*Attention\w*(, [A-Z]\w*Attention\w*)*", "...Attention"),
    (r"(?<=: )Attention(?= of this)", "...Attention"),
    (r"\b[A-Z]\w*(ForCausalLM|ForConditionalGeneration|LMHead\w*|ForSpeechToText)\b", "...Model"),
)
"""What one model's reason says besides, and what stands for it."""


EARLY = ("", "in enable", "at the first forward pass")


@dataclass
class Reasons:
    """Reasons in the order in which they came up; what differs only in names and numbers is one of them."""

    known: list[str] = field(default_factory=list)

    def number(self, outcome: Outcome) -> int:
        late = outcome.stage not in EARLY
        text = general(outcome.reason) + (f" ({outcome.stage})" if late else "")
        if text not in self.known:
            self.known.append(text)
        return 1 + self.known.index(text)


def general(reason: str) -> str:
    """A reason without the names and numbers of one model, and on one line."""
    reason = re.sub(r"\s+", " ", reason).strip()
    for pattern, short in NAMES:
        reason = re.sub(pattern, short, reason)
    return reason


def spelled(outcomes: list[Outcome], reasons: Reasons) -> str:
    """A cell: what became of it with every compressor, in one word where that is the same."""
    words = []
    for outcome in outcomes:
        word = SHORT.get(outcome.kind, outcome.kind)
        if outcome.reason and outcome.kind not in ("right", "left alone"):
            word += f" [{reasons.number(outcome)}]"
        words.append(word)
    if len(set(words)) == 1:
        return words[0]
    return "; ".join(f"{name}: {word}" for name, word in zip(COMPRESSORS, words, strict=True))


def page(outcomes: dict[tuple[Family, str, bool], list[Outcome]], release: str) -> str:
    """The whole page."""
    reasons, lines = Reasons(), [INTRODUCTION.format(release=release, command=COMMAND)]
    rows = dict.fromkeys(family for family, _, _ in outcomes)
    for how, title, first in PARTS:
        lines += ["", f"## {title}", "", f"| {first} | {' | '.join(HEADINGS)} |", "|---" * (1 + len(CELLS)) + "|"]
        for family in rows:
            if family.how == how:
                cells = [spelled(outcomes[family, *place], reasons) for place in CELLS]
                lines.append(f"| `{family.name}` | {' | '.join(cells)} |")
    lines += ["", "## Reasons", "", "Names and numbers of single models are left out.", ""]
    lines += [f"{number}. {html.escape(text, quote=False)}" for number, text in enumerate(reasons.known, 1)]
    return "\n".join(lines) + "\n"


def rows_of(text: str) -> dict[Family, list[str]]:
    """The cells of a page, per family."""
    found: dict[Family, list[str]] = {}
    how = ""
    for line in text.splitlines():
        how = next((part for part, title, _ in PARTS if line == f"## {title}"), how)
        if row := re.match(r"\| `([^`]+)` \| (.*) \|$", line):
            found[Family(row[1], how)] = row[2].split(" | ")
    return found


def reasons_of(text: str) -> dict[int, str]:
    """The numbered reasons of a page."""
    return {int(found[1]): html.unescape(found[2]) for found in re.finditer(r"^(\d+)\. (.*)$", text, re.M)}


INTRODUCTION = """\
# Model families

What becomes of every causal model type of transformers when it is given a CentroidCache. Measured with transformers
{release} by

```
{command}
```

It builds one tiny random model of each (two layers, or as many as its pattern of layers needs), compresses a prompt of
90 tokens to 40 %, and reads three single tokens, then four at once. What is right does not come from this package: a
stock cache in which every token keeps its own place, and holds the key and value of the centroid that it joined, is
read by the plain model with whatever that adds to its attention by place (causal masks, windows, relative positions).
N tokens with one key weigh as much as one slot of degree N, so the logits must be equal.

- **right**: they are, to half the digits of float32 (3.5e-4 of the largest logit; rounding made 2.3e-6 at most), the
  prompt's logits are bit-equal to the plain model's, and merging is heard (it moves the logits by at least 1e-2).
- **left alone**: nothing was compressed, and all logits are bit-equal to the plain model's. All layers are sliding
  windows, which bound their own caches, or the model keeps its text in a form of its own and never asks the cache.
- **refused [n]**: with reason n of the list at the end, in `enable` or at the first forward pass (or later, where the
  list says when), and always before the first token that could be wrong.
- **-**: transformers has no such attention for the family.
- **not run here [n]**: its model cannot be made in this environment.

Nothing else occurs. Every cell stands for two compressors: KV heads that cluster for themselves ("per head"), and heads
of a layer that all merge the same tokens ("pooled"). They are named where they differ. What follows a slash is another
setting of the same family. Encoder-decoder models read encoder states that are given to them. Models for pictures and
sound that wrap a decoder are as that decoder is; those that are causal model types themselves read text here. A row is
true of the settings of its tiny model. A checkpoint with other settings (sliding windows, shared keys, latent
attention) may be refused where its family is right, and always by name.

`make sweep` runs all of it again and compares; `make test` does so for some families of every kind."""
