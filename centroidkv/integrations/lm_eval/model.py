"""lm-eval's Hugging Face model, generating and scoring through a CentroidCache."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from torch import Tensor
from tqdm import tqdm

import centroidkv
from centroidkv.errors import EvaluationError
from centroidkv.integrations.lm_eval.generation import generation_arguments
from centroidkv.integrations.lm_eval.options import Options
from centroidkv.integrations.lm_eval.prompt import Prompt, fit
from centroidkv.integrations.lm_eval.question import question_start
from centroidkv.integrations.lm_eval.tally import Tally
from centroidkv.integrations.transformers import CentroidCache, enable
from centroidkv.records import Budget

log = logging.getLogger(__name__)


@register_model("centroidkv")
class CentroidLM(HFLM):
    """lm-eval's ``hf`` model whose KV cache is clustered; every option of ``hf`` works besides the ones named below.

    Generation: the prompt is processed with full attention, then compressed, then again every ``interval`` tokens.
    With ``protocol="query-agnostic"`` that holds for the context alone; the question is appended to the compressed
    cache (:func:`~centroidkv.integrations.lm_eval.question_start` says where it begins). A batch is padded on the
    left, and every row is compressed as it would be alone.

    Log-likelihoods: all but the last prompt token (query-aware), or the context (query-agnostic), is compressed;
    the rest and the continuation are then fed ``interval`` tokens at a time, so that every scored token is predicted
    from a compressed cache. One request after the other, whatever the batch size.

    Args:
        pretrained: as for ``hf``: a folder, a hub name, or a model.
        preset: see :class:`~centroidkv.integrations.lm_eval.options.Options`, like the next four.
        budget: share or number of slots; default a quarter.
        interval: tokens between two compressions; default 128.
        protocol: ``"query-aware"`` (default) or ``"query-agnostic"``.
        overlong: ``"refuse"`` (default) or ``"middle"``.
        batch_size: prompts generated together, a whole number.
        kwargs: what else ``hf`` takes.

    Raises:
        EvaluationError: an option is unknown, void beside another, or one of ``hf`` that is not carried over
            (``batch_size=auto``, ``truncation``, ``backend=seq2seq``, a whole number as ``think_end_token``); or the
            model brings code of its own, and ``trust_remote_code`` is not True.
    """

    def __init__(
        self,
        pretrained: Any,
        preset: str | None = "distinctive",
        budget: Budget | float | None = None,
        interval: int | None = None,
        protocol: str = "query-aware",
        overlong: str = "refuse",
        batch_size: int | str | None = 1,
        **kwargs: Any,
    ) -> None:
        self.options = Options(preset, budget, interval, protocol, overlong)
        if not str(batch_size).isdecimal() or int(str(batch_size)) < 1:
            raise EvaluationError(
                f"batch_size is a whole number from 1 on, got {batch_size!r}; lm-eval's automatic search measures the "
                "plain model, whose memory says nothing about a compressed one"
            )
        if kwargs.get("truncation"):
            raise EvaluationError("truncation would cut prompts in the tokenizer; use overlong=middle, or max_length=")
        if isinstance(token := kwargs.get("think_end_token"), int) or str(token).isdigit():
            raise EvaluationError(f"think_end_token is a text here, such as </think>; got the token number {token!r}")
        # None would have transformers ask on the terminal, where anything that types may answer.
        trusted = kwargs.setdefault("trust_remote_code", False)
        if not isinstance(trusted, bool):
            raise EvaluationError(f"trust_remote_code is True or False, got {trusted!r}")
        try:
            super().__init__(pretrained=pretrained, batch_size=int(str(batch_size)), **kwargs)
        except ValueError as error:
            if trusted or "trust_remote_code" not in str(error):
                raise
            raise EvaluationError(
                f"the model {pretrained!r} brings Python code of its own, which is not run unasked; read it, and if "
                "you trust it, add trust_remote_code=True to --model_args"
            ) from error
        if self.backend != "causal":
            raise EvaluationError(f"only decoder models have a cache that grows; this one is {self.backend!r}")
        self.tally = Tally()

    # -- generation -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """lm-eval's request: continue each prompt up to a stop string or a number of tokens.

        Raises:
            EvaluationError: a prompt that is empty, that does not fit the model, or that cannot be split for
                query-agnostic runs; generation arguments that cannot be carried out.
        """
        kwargs = [generation_arguments(request.args[1], self.max_gen_toks) for request in requests]
        prompts = [self._prompt(i, request, kwargs[i]["max_gen_toks"]) for i, request in enumerate(requests)]
        texts: list[str] = [""] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc=f"generate: {self.options.label}")
        for batch in self._batches(prompts, kwargs):
            written = self._continue(batch, dict(kwargs[batch[0].index]))
            for prompt, text in zip(batch, written, strict=True):
                texts[prompt.index] = text
                self.cache_hook.add_partial("generate_until", requests[prompt.index].args, text)
            bar.update(len(batch))
        bar.close()
        self.tally.warn(log, self.options.label)
        return texts

    def _batches(self, prompts: list[Prompt], kwargs: list[Any]) -> Iterator[list[Prompt]]:
        """Prompts with the same generation arguments, longest first, ``batch_size`` at a time."""
        groups: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            groups.setdefault(repr(sorted(kwargs[prompt.index].items())), []).append(prompt)
        for group in groups.values():
            group.sort(key=lambda prompt: -len(prompt.ids))
            for start in range(0, len(group), self.batch_size):
                yield group[start : start + self.batch_size]

    def _continue(self, batch: list[Prompt], kwargs: dict[str, Any]) -> list[str]:
        """The texts that follow ``batch``, cut at the first stop string."""
        until = handle_stop_sequences(
            kwargs.pop("until", None), eos=self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        )
        new = kwargs.pop("max_gen_toks")
        contexts, context_mask = self._pad([prompt.ids[: prompt.context] for prompt in batch])
        questions, question_mask = self._pad([prompt.ids[prompt.context :] for prompt in batch])
        ids, mask = torch.cat([contexts, questions], 1), torch.cat([context_mask, question_mask], 1)
        cache = self.options.new_cache()
        with enable(self.model) if cache is not None else nullcontext():
            if cache is not None:
                kwargs["past_key_values"] = cache
                if contexts.shape[1]:
                    self._feed(contexts, cache, context_mask)
            out = self._model_generate(
                context=ids, attention_mask=mask, stop=until, max_length=ids.shape[1] + new, **kwargs
            )
        self.tally.add(cache, len(batch))
        return [
            postprocess_generated_text(self.tok_decode(row[ids.shape[1] :]), until, self.think_end_token)
            for row in out.tolist()
        ]

    # -- log-likelihoods ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """lm-eval's request: (sum of natural log probabilities of the continuation, whether greedy would write it).

        A continuation without tokens is certain: (0.0, True).

        Raises:
            EvaluationError: a prompt that does not fit the model, or that cannot be split for query-agnostic runs.
        """
        encoded = [self._encoded(*request.args[:2]) for request in requests]
        if self.options.plain:
            return self._plain_loglikelihood(requests, encoded, disable_tqdm)
        # The last token of an answer is predicted and not read, so it needs no room.
        pairs = [
            (self._prompt(index, request, max(0, len(answer) - 1), ids), answer)
            for index, (request, (ids, answer)) in enumerate(zip(requests, encoded, strict=True))
        ]
        # Choices of one question stand together and share the processing of their context.
        pairs.sort(key=lambda pair: (-len(pair[0].ids), pair[0].ids))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        known: tuple[list[int], int] | None = None
        base = self.options.new_cache()
        with enable(self.model):
            for prompt, answer in tqdm(
                pairs, disable=disable_tqdm or self.rank != 0, desc=f"score: {self.options.label}"
            ):
                context = prompt.context or len(prompt.ids) - 1
                if known != (prompt.ids, context):
                    known, base = (prompt.ids, context), self.options.new_cache()
                    if context:
                        self._feed(torch.tensor([prompt.ids[:context]], device=self.device), base)
                cache = copy.deepcopy(base)
                self.tally.add(cache, 1)
                results[prompt.index] = self._score(cache, prompt.ids[context:], answer)
                self.cache_hook.add_partial("loglikelihood", requests[prompt.index].args, results[prompt.index])
        self.tally.warn(log, self.options.label)
        return results

    def _plain_loglikelihood(
        self, requests: Sequence[Any], encoded: list[tuple[list[int], list[int]]], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        """As lm-eval's own model, which takes no continuation without tokens: those are answered here."""
        asked = [index for index, (ids, answer) in enumerate(encoded) if ids and answer]
        for request, (ids, answer) in zip(requests, encoded, strict=True):
            if answer and not ids:
                self._prompt(0, request, 0, ids)  # which says that it is empty
        found = self._loglikelihood_tokens(
            [(tuple(requests[index].args[:2]), *encoded[index]) for index in asked], disable_tqdm=disable_tqdm
        )
        results = [(0.0, True)] * len(requests)
        for index, result in zip(asked, found, strict=True):
            results[index] = result
        for request, (_, answer) in zip(requests, encoded, strict=True):
            if not answer:
                self.cache_hook.add_partial("loglikelihood", request.args, (0.0, True))
        return results

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a context and of its continuation, as lm-eval makes them, the empty ones included."""
        if context:
            return self._encode_pair(context, continuation)
        ids, answer = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
        # A text that begins with the prefix itself needs no other.
        return (answer[:1], answer[1:]) if answer[:1] == ids else (ids, answer)

    def _score(self, cache: CentroidCache | None, rest: list[int], answer: list[int]) -> tuple[float, bool]:
        """Teacher forcing: feed ``rest`` and ``answer``, as many tokens at a time as are generated between events."""
        if not answer:
            return 0.0, True
        ids = torch.tensor([(rest + answer)[:-1]], device=self.device)
        logits = torch.cat([self._feed(piece, cache) for piece in ids.split(self.options.every, 1)], 1)
        scores = logits[0, -len(answer) :].float().log_softmax(-1)
        target = torch.tensor(answer, device=self.device)
        return float(scores.gather(1, target[:, None]).sum()), bool((scores.argmax(-1) == target).all())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Only for ``preset=full``.

        Raises:
            EvaluationError: the model is compressed.
        """
        if self.options.plain:
            return list(super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm))
        raise EvaluationError(
            "loglikelihood_rolling (perplexity of whole texts) scores every token from the first one on, so there is "
            "no context to compress before scoring, and the number would be the plain model's. Use a task with a "
            "prompt, or preset=full for the uncompressed baseline"
        )

    # -- tokens ---------------------------------------------------------------------------------------------------

    def _prompt(self, index: int, request: Any, new: int, ids: list[int] | None = None) -> Prompt:
        """A request in tokens, with its context's length, fitted to the model's length less ``new`` tokens."""
        text = request.args[0]
        ids = self.tok_encode(text) if ids is None else ids
        if not ids:
            raise EvaluationError(f"the prompt of a {request.task_name!r} request is empty: there is no cache to make")
        context = 0
        if self.options.protocol == "query-agnostic" and not self.options.plain:
            # The tokens are those of the whole prompt in either protocol. The context's are the ones that it has in
            # common with the context tokenised alone: none of them holds a character of the question.
            alone = self.tok_encode(text[: question_start(request.task_name, text, request.doc)])
            context = next((i for i, (a, b) in enumerate(zip(ids, alone, strict=False)) if a != b), len(alone))
            context = min(context, len(ids) - 1)
            if not context:
                raise EvaluationError(
                    f"no token of this {request.task_name!r} prompt belongs to its context alone; it begins "
                    f"{text[:80]!r}. Use protocol=query-aware"
                )
        return fit(Prompt(index, ids, context), new, self.max_length, self.options.overlong)

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Rows padded on the left, ``[B, T]`` ids and mask."""
        longest = max(len(row) for row in rows)
        pad = self.tokenizer.pad_token_id
        ids = [[pad] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return (
            torch.tensor(ids, dtype=torch.long, device=self.device).reshape(len(rows), longest),
            torch.tensor(mask, dtype=torch.long, device=self.device).reshape(len(rows), longest),
        )

    def _feed(self, ids: Tensor, cache: CentroidCache | None, mask: Tensor | None = None) -> Tensor:
        """One forward pass of ``ids [B, T]`` into ``cache``: logits ``[B, T, V]``, or with a mask of the last token."""
        more: dict[str, Any] = {}
        if mask is not None:
            # Positions count real tokens, as generate counts them for the tokens that follow.
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            more = {"attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
        precision = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=precision, enabled=precision is not None):
            out: Tensor = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **more).logits
        return out

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its result file about the model, and under ``"centroidkv"`` what was compressed."""
        own = {"version": centroidkv.__version__, **self.options.as_dict(), **self.tally.as_dict()}
        return {**super().get_model_info(), "centroidkv": own}
