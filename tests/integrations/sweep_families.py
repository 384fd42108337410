"""The families of the sweep: every causal model type of transformers, variants, encoder-decoder pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from sweep_build import louder, tiny_config
from sweep_decoders import DECODERS, VARIANTS
from sweep_pairs import PAIRS
from transformers.models.auto import modeling_auto

CAUSAL = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SEQUENCES = {
    **modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}


LOUDER = 8.0
"""How many times larger all matrices are than a fresh model's, so that merging shows in the logits."""


@dataclass(frozen=True)
class Family:
    """One row of the table. ``how``: "alone", or an encoder-decoder model given a "pair" of caches or a "bare" one."""

    name: str
    how: str = "alone"

    @property
    def model_type(self) -> str:
        return self.name.split("/")[0]

    @property
    def overrides(self) -> dict[str, Any]:
        if self.how != "alone":
            return PAIRS[self.name]
        return VARIANTS[self.name] if self.name in VARIANTS else DECODERS.get(self.name, {})

    @property
    def class_name(self) -> str:
        return (CAUSAL if self.how == "alone" else SEQUENCES)[self.model_type]

    def make(self, attention: str) -> Any:
        """The tiny model, the same weights every time."""
        torch.manual_seed(0)
        config, cls = tiny_config(self.model_type, self.overrides), getattr(transformers, self.class_name)
        if type(config) is not cls.config_class and type(config.get_text_config()) is cls.config_class:
            config = config.get_text_config()
        with torch.device("meta"):
            size = sum(weight.numel() for weight in cls._from_config(config).parameters())
        assert size < 4e6, f"{self.name} is not tiny: {size / 1e6:.0f} million weights"
        torch.manual_seed(0)
        return louder(cls._from_config(config, attn_implementation=attention).eval(), LOUDER)


def families() -> list[Family]:
    """All rows, in the order of the table."""
    alone = sorted([*CAUSAL, *VARIANTS], key=str.lower)
    pairs = [Family(name, how) for how in ("pair", "bare") for name in sorted(PAIRS) if name.split("/")[0] in SEQUENCES]
    return [Family(name) for name in alone if name.split("/")[0] in CAUSAL] + pairs
