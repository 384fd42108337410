"""Switching a model to the attention function that takes degrees, and back when its last user has left."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, EncoderDecoderCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from centroidkv.errors import BackendError
from centroidkv.integrations.transformers.attention import PREFIX, WRAPPED, check_flash, is_flash, wrap, wrap_flash
from centroidkv.integrations.transformers.flow import attends_by_interface, feeds_a_cache
from centroidkv.integrations.transformers.handover import any_open
from centroidkv.integrations.transformers.layout import lay_out
from centroidkv.integrations.transformers.masks import made_from_padding
from centroidkv.integrations.transformers.release import STOCK_BIAS_BACKENDS, STOCK_TAKES_BIAS, text_config

CACHE_NAMES = ("past_key_values", "cache", "past_key_value", "layer_past")
"""What attention modules call the cache they are given, in one release and family or another."""


@dataclass(eq=False)
class _Switched:
    """A model that attends through our function.

    Args:
        config: the configuration that says so; kept, so that no other can take its place under the same id.
        before: the attention it had.
        ours: the one it has.
        modules: its attention modules.
        users: handles that have not been undone.
    """

    config: Any
    before: str
    ours: str
    modules: weakref.WeakSet[Any]
    users: int = 1

    def add_hooks(self) -> None:
        """Let every attention module be looked after, once."""
        self.remove_hooks()  # that stayed, or that a copy has of its original
        for module in self.modules:
            module.register_forward_hook(_look_after, with_kwargs=True)

    def remove_hooks(self) -> None:
        """Let none be looked after."""
        for module in self.modules:
            for number in [number for number, hook in module._forward_hooks.items() if hook is _look_after]:
                del module._forward_hooks[number]
                module._forward_hooks_with_kwargs.pop(number, None)

    @property
    def waits(self) -> bool:
        """Whether an attention module has still to sign for something."""
        return any_open({id(self.config), *(id(module.config) for module in self.modules)})


_switched: dict[int, _Switched] = {}
"""By the id of the configuration: the models that are switched now. A model has one attention for all threads."""
_left: list[_Switched] = []
"""Models that were given back while a handover was on its way: their hooks stay until it is signed for or refused."""
_lock = threading.RLock()


class Enabled:
    """What :func:`enable` returns: undo it with :meth:`undo`, or use it as a context manager.

    A model may be enabled by several users at once, in threads or one inside another. It gets its own attention back
    when the last of them has left.
    """

    def __init__(self, model: Any, switched: _Switched | None) -> None:
        self._model, self._switched = model, switched

    def undo(self) -> None:
        """Leave; the last user to leave gives the model its own attention back, unless it was given another."""
        with _lock:
            mine, self._switched = self._switched, None
            if mine is None:
                return
            mine.users -= 1
            if mine.users:
                return
            if _switched.get(id(mine.config)) is mine:
                del _switched[id(mine.config)]
            if mine.config._attn_implementation == mine.ours:
                self._model.set_attn_implementation(mine.before)
            # In this order. A layer opens its handover, then looks at the attention: one of the two sees the other.
            _left.append(mine)
            _remove_hooks()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def enable(model: Any) -> Enabled:
    """Let ``model`` attend to degrees, in releases and with back ends whose own attention cannot.

    Switches the model, through its public ``set_attn_implementation``, to a function that calls the stock one with
    ln N added to its mask (and :func:`~centroidkv.attention.degree_attention` for single tokens), or, for kernels of
    the flash-attention kind, to its keys as two channels. Without a compressed cache the stock function is called as it
    is. A hook after every attention module looks whether it took what the cache handed over. Harmless where it is not
    needed; several threads that share the model may each enter it.

    Args:
        model: a transformers model that attends with "sdpa", "eager" or a flash attention ("flex_attention" is left
            alone in releases that hand it the degrees themselves).

    Returns:
        A handle: ``handle.undo()``, or ``with enable(model): ...`` which undoes also after an exception.

    Raises:
        BackendError: the model's attention would ignore the degrees and cannot be wrapped.
        CacheError: the model has layers that no CentroidCache serves (linear or latent attention, shared keys).
    """
    lay_out(model.config)
    config = _own_config(model)
    with _lock:
        name, known = str(config._attn_implementation), _switched.get(id(config))
        if known is not None and name == known.ours:
            known.users += 1
            return Enabled(model, known)
        if name in STOCK_BIAS_BACKENDS and name not in WRAPPED and STOCK_TAKES_BIAS:
            return Enabled(model, None)
        before = _before(name)
        flash = is_flash(before)
        if flash:
            check_flash(before, config)
        elif before not in WRAPPED:
            raise BackendError(
                f"attention {before!r} cannot be given the degrees of a compressed cache; load the model with "
                f"attn_implementation= one of {WRAPPED} or flash attention, or call "
                "model.set_attn_implementation('sdpa')"
            )
        _check_reach(model)
        ours = _ours(before)
        AttentionInterface.register(ours, (wrap_flash if flash else wrap)(before))
        AttentionMaskInterface.register(ours, _mask_function(before, flash))
        model.set_attn_implementation(ours)
        if str(config._attn_implementation) != ours:
            model.set_attn_implementation(before)
            raise BackendError(
                f"{type(model).__name__} does not let its attention be chosen (by transformers' AttentionInterface), "
                "so it would ignore the degrees of a compressed cache; this model is not served"
            )
        modules = (one for one in model.modules() if hasattr(one, "layer_idx") and hasattr(one, "config"))
        switched = _Switched(config, before, ours, weakref.WeakSet(modules))
        switched.add_hooks()
        _switched[id(config)] = switched
        _left[:] = [one for one in _left if one.config is not config]  # these hooks do what those would
        return Enabled(model, switched)


def _check_reach(model: torch.nn.Module) -> None:
    """Refuse a model whose attention modules compute attention by themselves, where no function of ours is called."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    deaf = {kind.__name__ for kind in kinds if feeds_a_cache(kind) and not attends_by_interface(kind)}
    if deaf:
        raise BackendError(
            f"{', '.join(sorted(deaf))} of this {type(model).__name__} computes attention by itself instead of calling "
            "transformers' AttentionInterface, so it would ignore the degrees of a compressed cache; this model is not "
            "served"
        )


def _own_config(model: Any) -> Any:
    """The configuration that says how the decoder of ``model`` attends, and stays the same object."""
    config = text_config(model.config)
    # Of an encoder-decoder model some releases make a new one whenever they are asked.
    return config if config is text_config(model.config) else model.config


def _ours(name: str) -> str:
    """What our function around ``name`` is called.

    transformers would look for a package or a hub's kernel behind any name with "flash" or "/" in it.
    """
    return PREFIX + name.replace("flash", "channels").replace("/", "_")


def _before(name: str) -> str:
    """The attention behind ``name`` if that is one of ours, as in a copy of a model that was enabled; else ``name``."""
    if not name.startswith(PREFIX):
        return name
    return next((known for known in ALL_MASK_ATTENTION_FUNCTIONS if _ours(known) == name), name)


def _mask_function(name: str, flash: bool) -> Any:
    make = ALL_MASK_ATTENTION_FUNCTIONS[name]
    return make if flash else made_from_padding(make)  # flash's is a slice of the caller's own


def _remove_hooks() -> None:
    """Take the hooks off the models that were given back, unless they are still needed."""
    with _lock:
        for one in [one for one in _left if not one.waits]:
            _left.remove(one)
            one.remove_hooks()


def _look_after(module: Any, args: Any, *rest: Any) -> None:
    """After an attention module: refuse what it computed if it did not take what the cache handed over.

    ``rest``: keyword arguments and output; the output alone if another thread has taken the hook off by now, which is
    done only when there is nothing to look after.
    """
    if torch.compiler.is_compiling() or len(rest) < 2:
        return
    try:
        _check_attended(module, rest[0])
    finally:
        if _left:
            _remove_hooks()


def _check_attended(module: Any, kwargs: dict[str, Any]) -> None:
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    check = getattr(cache, "check_attended", None)
    if check is None:  # a stock cache, perhaps with layers of ours (kvpress)
        layers, index = getattr(cache, "layers", []), module.layer_idx
        check = getattr(layers[index], "check_attended", None) if index in range(len(layers)) else None
    if check is not None:
        check(type(module).__name__)
