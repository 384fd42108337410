"""What a tail's logits say about the cache they were read over."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from analysis.evaluation.fidelity.tasks import Sample


def measure(sample: Sample, logits: Tensor, full: Tensor) -> dict[str, float]:
    """Figures of one sample; ``logits`` and ``full [m, V]`` over the compressed and over the full cache.

    kl: mean KL(full || compressed) in nats over the question's tokens (all tokens of a continuation). nll: mean
    negative log-likelihood of the right answers' tokens (of a continuation: of its tokens), nats per token. exact: the
    share of answers whose every token has the highest logit, which is when greedy decoding gives them. kl_answer: KL
    where answers are predicted.
    """
    wrong = ~torch.isfinite(logits)
    if bool(wrong.any()):
        raise ValueError(f"{int(wrong.sum())} logits of {sample.task} {sample.index} are not finite")
    kl = kl_div(logits.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    figures = {"kl": float(kl[sample.question].mean())}
    tokens = sample.tail[0]
    if not sample.answers:
        figures["nll"] = float(cross_entropy(logits[:-1], tokens[1:]))
        return figures
    before = torch.cat([torch.arange(span.start - 1, span.stop - 1) for span in sample.answers])
    figures["nll"] = float(cross_entropy(logits[before], tokens[before + 1]))
    figures["kl_answer"] = float(kl[before].mean())
    best = logits.argmax(-1)
    hits = [
        bool((best[span.start - 1 : span.stop - 1] == tokens[span.start : span.stop]).all()) for span in sample.answers
    ]
    figures["exact"] = sum(hits) / len(hits)
    return figures
