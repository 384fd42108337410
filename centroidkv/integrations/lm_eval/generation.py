"""How a request is to be generated: lm-eval's arguments, refused where they could not be carried out."""

from __future__ import annotations

from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from centroidkv.errors import EvaluationError

OURS = (
    "input_ids", "inputs_embeds", "context", "attention_mask", "position_ids", "past_key_values", "use_cache",
    "cache_implementation", "cache_config", "pad_token_id", "stop", "stopping_criteria", "max_length",
    "return_dict_in_generate",
)  # fmt: skip
"""What the model sets itself: a task that sets it too would be overruled, or end in an error of transformers'."""


def generation_arguments(given: Any, default_tokens: int) -> dict[str, Any]:
    """lm-eval's normalised generation arguments.

    Raises:
        EvaluationError: a text of no tokens is asked for, several per prompt, stop strings that are no texts, or what
            the model must set itself.
    """
    if not isinstance(given, dict):
        raise EvaluationError(f"generation arguments are a table, got {given!r:.80}")
    until = given.get("until", [])
    strings = until if isinstance(until, list) else [until]
    if not all(isinstance(text, str) for text in strings):
        raise EvaluationError(f"until is a stop string or a list of them, which may be empty; got {until!r:.80}")
    for name in OURS:
        if name in given:
            raise EvaluationError(
                f"generation argument {name}={given[name]!r:.80} is set by the model itself; leave it out"
            )
    if given.get("num_return_sequences", 1) != 1:
        raise EvaluationError(
            f"one text per prompt is generated, got num_return_sequences={given['num_return_sequences']!r}"
        )
    try:
        found: dict[str, Any] = dict(normalize_gen_kwargs(given, default_tokens))
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"generation arguments {given!r:.200}: {error}") from error
    if found["max_gen_toks"] < 1:
        raise EvaluationError(
            f"max_gen_toks is a whole number >= 1, got {found['max_gen_toks']}: no text would be generated"
        )
    return found
