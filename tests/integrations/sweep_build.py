"""Tiny random models of any family that transformers knows, built from what its configuration class accepts.

A configuration is filled from ``sweep_sizes.SIZES`` with the names that its class knows, nested configurations included;
``sweep_families`` holds what single families need besides.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sweep_sizes import SIZES
from transformers import CONFIG_MAPPING, PreTrainedConfig

BASE_NAMES = frozenset(inspect.signature(PreTrainedConfig.__init__).parameters)


def names_of(config_class: type) -> set[str]:
    """The options that a configuration class states itself, in its ``__init__`` or as annotated fields."""
    names: set[str] = set()
    for cls in config_class.__mro__:
        if cls is PreTrainedConfig:
            break
        names |= set(cls.__dict__.get("__annotations__", ()))
        if "__init__" in cls.__dict__:
            names |= set(inspect.signature(cls.__init__).parameters)
    return names - {"self", "args", "kwargs"}


def tiny_options(config_class: type, overrides: dict[str, Any]) -> dict[str, Any]:
    """Sizes for what the class knows, then ``overrides``; a value ``DROP`` takes a name out again."""
    known = names_of(config_class)
    # An option and its alias would overwrite one another.
    aliases = {alias for alias, name in config_class.attribute_map.items() if name in known}
    options = {name: value for name, value in SIZES.items() if name in known and name not in aliases}
    if "layer_types" in options and "sliding_window" not in known:
        del options["layer_types"]
    for name, nested in config_class.sub_configs.items():
        given = overrides.get(name, {})
        if not isinstance(nested, type) or given is None:
            continue
        if isinstance(given, dict):
            kind = given.get("model_type") or getattr(nested, "model_type", None)
            cls = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else nested
            if not hasattr(cls, "sub_configs"):
                continue
            options[name] = {**tiny_options(cls, {k: v for k, v in given.items() if k != "model_type"})}
            if kind:
                options[name]["model_type"] = kind
    for name, value in overrides.items():
        if name in config_class.sub_configs and isinstance(value, dict):
            continue
        if value is DROP:
            options.pop(name, None)
        else:
            options[name] = value
    return options


class Drop:
    """Marks an option that a family must not be given."""

    def __repr__(self) -> str:
        return "DROP"


DROP = Drop()


def tiny_config(model_type: str, overrides: dict[str, Any]) -> Any:
    """The configuration of a tiny model of this type."""
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
