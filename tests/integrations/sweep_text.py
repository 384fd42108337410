"""The text that every family reads, whatever it wants to be given."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sweep_decoders import FULL_IDS, ONE_BY_ONE, WANTS_PAIR
from sweep_families import Family
from sweep_sizes import HIDDEN
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

TOKENS, STEPS = 90, (1, 1, 1, 4)


class Encoded(BaseModelOutput):
    """What a decoder reads of its encoder: states alone, and nothing of what some look for besides."""

    attention_mask = router_logits = router_probs = None


class Text:
    """A prompt, three single tokens, and four at once."""

    def __init__(self, family: Family, model: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, 120, (1, TOKENS + sum(STEPS)), generator=generator)
        self.across = torch.randn(1, 20, HIDDEN, generator=generator)
        self.family, self.model = family, model
        known = inspect.signature(model.forward).parameters
        self.name = "cache" if "cache" in known else "past_key_values"

    def prompt(self, cache: Any) -> torch.Tensor:
        """Logits of the prompt, ``[1, TOKENS, vocabulary]``."""
        if self.family.model_type in ONE_BY_ONE:
            return torch.cat([self._read(cache, start, 1) for start in range(TOKENS)], dim=1)
        return self._read(cache, 0, TOKENS)

    def step(self, cache: Any, index: int) -> torch.Tensor:
        """Logits of the tokens of a step."""
        return self._read(cache, TOKENS + sum(STEPS[:index]), STEPS[index])

    def _read(self, cache: Any, start: int, new: int) -> torch.Tensor:
        begin = 0 if self.family.model_type in FULL_IDS else start
        given: dict[str, Any] = {"use_cache": True, self.name: cache}
        if self.family.how == "alone":
            given["input_ids"] = self.ids[:, begin : start + new]
            if self.family.name == "mllama/cross attention" and start == 0:
                given["cross_attention_states"] = self.across
        else:
            given["decoder_input_ids"] = self.ids[:, begin : start + new]
            given["encoder_outputs"] = Encoded(last_hidden_state=self.across.clone())  # some add to it in place
        with torch.no_grad():
            return self.model(**given).logits[:, -new:]

    def stock_cache(self) -> Any:
        """What transformers would use: with the layers of the model's configuration, where it can read them off."""
        try:
            own = DynamicCache(config=self.model.config)
        except (AttributeError, ValueError, TypeError):
            own = DynamicCache()
        return self.paired(own) if self.family.how == "alone" else EncoderDecoderCache(own, DynamicCache())

    def paired(self, own: Any) -> Any:
        """What the model is given: the cache, or a pair of caches with this one for the tokens themselves."""
        pair = self.family.how == "pair" or self.family.model_type in WANTS_PAIR
        return EncoderDecoderCache(own, DynamicCache()) if pair else own
