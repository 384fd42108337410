"""Where the question of a benchmark prompt begins: query-agnostic runs compress before they see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from centroidkv.errors import EvaluationError

RULER_MARKERS = {
    "niah_": "\nWhat ",
    "ruler_vt": "\nQuestion: ",
    "ruler_cwe": "\nQuestion: ",
    "ruler_fwe": "\nQuestion: ",
    "ruler_qa_": "\nAnswer the question based on the given documents.",
}
"""How the question of each RULER task begins, by the beginning of the task's name. The last occurrence counts: worked
examples in the prompt, and instructions before the documents, hold the same words."""

LONGBENCH = "longbench_"
"""LongBench documents carry their context as a field of its own; all that follows it is the question."""


def question_start(task: str | None, prompt: str, doc: Mapping[str, Any] | None) -> int:
    """The index of the first character of ``prompt`` that is not context.

    RULER: the last line that begins as :data:`RULER_MARKERS` says. LongBench: the end of ``doc["context"]``, where it
    stands last in the prompt. What follows, instructions, chat template and answer prefix included, is the question.

    Args:
        task: lm-eval's name of the task, such as ``"niah_single_1"`` or ``"longbench_qasper"``.
        prompt: the text the model is given, with or without a chat template.
        doc: lm-eval's record of the sample.

    Raises:
        EvaluationError: no rule for this task, or the prompt does not look as its rule expects.

    Example:
        >>> prompt = "A number is hidden below.\\nThe magic number is 7.\\nWhat is the magic number?"
        >>> prompt[question_start("niah_single_1", prompt, {}) :]
        'What is the magic number?'
    """
    name = task or ""
    for prefix, marker in RULER_MARKERS.items():
        if name.startswith(prefix):
            return _after_newline(name, prompt, marker)
    if name.startswith(LONGBENCH):
        return _after_context(name, prompt, doc)
    raise EvaluationError(
        f"protocol=query-agnostic compresses the context before the question is appended, and for task {task!r} no "
        "rule says where the question begins; there are rules for RULER (niah_*, ruler_*) and LongBench "
        "(longbench_*). Run this task with protocol=query-aware"
    )


def _after_newline(task: str, prompt: str, marker: str) -> int:
    found = prompt.rfind(marker)
    if found < 0:
        raise EvaluationError(
            f"the question of a {task} prompt is its last line that begins with {marker.strip()!r}; this prompt has "
            f"none, it ends {prompt[-80:]!r}. Was the task's template changed? Run it with protocol=query-aware"
        )
    return found + 1


def _after_context(task: str, prompt: str, doc: Mapping[str, Any] | None) -> int:
    doc = doc if isinstance(doc, Mapping) else {}
    context = doc.get("context")
    if not isinstance(context, str) or not context.strip():
        raise EvaluationError(
            f"the question of a {task} prompt is what follows the document's field 'context', a text; this document "
            f"has {sorted(doc)} and context {context!r:.40}. Run it with protocol=query-aware"
        )
    context = context.strip()  # chat templates may strip a message
    found = prompt.rfind(context)
    end = found + len(context)
    if found < 0 or not prompt[end:].strip():
        what = "does not occur in the prompt" if found < 0 else "is not followed by a question"
        raise EvaluationError(
            f"the context of this {task} document {what}, so the two cannot be told apart; the prompt ends "
            f"{prompt[-80:]!r}. Run it with protocol=query-aware"
        )
    return end
