"""Configurations of tiny models of any family that transformers knows.

A configuration is filled from ``sweep_sizes.SIZES`` with the names that its class knows, nested configurations
included; ``sweep_decoders`` and ``sweep_pairs`` hold what single families need besides.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sweep_sizes import SIZES
from transformers import CONFIG_MAPPING, PreTrainedConfig

DROP = ...
"""Stands for an option that a family must not be given."""


def names_of(config_class: type) -> set[str]:
    """The options that a configuration class states itself, in its ``__init__`` or as annotated fields."""
    names: set[str] = set()
    for cls in config_class.__mro__:
        if cls is PreTrainedConfig:
            break
        names |= set(inspect.get_annotations(cls))
        if "__init__" in vars(cls):
            names |= set(inspect.signature(cls.__init__).parameters)
    return names - {"self", "args", "kwargs"}


def tiny_options(config_class: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Sizes for what the class knows, then ``overrides``, which may nest."""
    known = names_of(config_class)
    # An option and its alias would overwrite one another.
    aliases = {alias for alias, name in config_class.attribute_map.items() if name in known}
    options = {name: value for name, value in SIZES.items() if name in known - aliases}
    if "sliding_window" not in known:
        options.pop("layer_types", None)
    overrides = dict(overrides)
    for name, nested in config_class.sub_configs.items():
        given = overrides.get(name, {})
        if isinstance(given, dict) and isinstance(nested, type):
            kind = given.get("model_type") or getattr(nested, "model_type", None)
            nested = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else nested  # noqa: SIM401 (it has no get)
            if hasattr(nested, "sub_configs"):  # not AutoConfig, which stands for any
                overrides[name] = tiny_options(nested, given) | ({"model_type": kind} if kind else {})
    return {name: value for name, value in (options | overrides).items() if value is not DROP}


def tiny_config(model_type: str, overrides: dict[str, Any]) -> Any:
    """The configuration of a tiny model of this type; ``overrides["of"]`` names the type of its decoder's alone."""
    overrides = dict(overrides)
    cls = CONFIG_MAPPING[overrides.pop("of", model_type)]
    return cls(**tiny_options(cls, overrides))


def louder(model: Any, factor: float) -> Any:
    """Multiply every matrix: fresh models attend nearly uniformly, and would hide a lost degree or position."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and not any(word in name for word in ("embed", "wte", "wpe", "lm_head")):
                weight.mul_(factor)
    return model
