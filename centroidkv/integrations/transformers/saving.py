"""A CentroidCache in one safetensors file: everything that the next token depends on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from centroidkv.cache import GrowingState, Held, Storage
from centroidkv.cache.columns import Columns
from centroidkv.cache.storage import as_storage, own
from centroidkv.compressor import Compressor
from centroidkv.errors import SavedCacheError
from centroidkv.integrations.transformers import saving_file as disk
from centroidkv.integrations.transformers import saving_schema as schema
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.integrations.transformers.release import WINDOW_TAKES, text_config
from centroidkv.integrations.transformers.saving_file import CHECKSUM, HEADER
from centroidkv.rotary import Rotary

if TYPE_CHECKING:
    from centroidkv.integrations.transformers.cache import CentroidCache

__all__ = ["CHECKSUM", "HEADER", "VERSION", "fingerprint", "load_cache", "save_cache"]

VERSION = 2
"""Of the format: what is in the header (saving_schema.py), and what tensors stand for."""

FINGERPRINT = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "layer_types", "sliding_window", "attention_chunk_size", "num_kv_shared_layers"),
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
    *("query_pre_attn_scalar", "attention_multiplier", "attn_logit_softcapping"),
)
"""Fields of a model's configuration that say what its keys and values mean; those that a model lacks are left out."""

AnyCache = TypeVar("AnyCache", bound="CentroidCache")


def fingerprint(config: Any) -> dict[str, Any]:
    """The FINGERPRINT fields of a configuration, as JSON has them. Weights are not looked at."""
    own_fields = text_config(config)
    found = {name: getattr(own_fields, name, None) for name in FINGERPRINT}
    return json.loads(json.dumps({name: value for name, value in found.items() if value is not None}))


def save_cache(cache: CentroidCache, path: str | PathLike[str]) -> None:
    """Write ``cache`` to ``path``: what :func:`load_cache` goes on from with the very same tokens.

    One safetensors file. Tensors: what every layer holds, as it is held (codes stay codes), tokens since the last
    event, queries noted since then, and the keys and values of sliding windows. Metadata: one line of JSON (format
    version, interval, compressor, storage, fingerprint of the model's configuration, every row's clock), and the
    SHA-256 of that line and all tensors. Token ids are not in it. The file is written beside ``path``, then renamed: an
    interrupted save leaves an older file whole, and what it leaves beside it is removed by the next save. A link is
    followed; an older file's permissions are kept.

    Raises:
        SavedCacheError: there is nothing to save, a forward pass stopped half-way, or the file cannot be written.
    """
    lengths = {layer.get_seq_length() for layer in cache.layers}
    if lengths in (set(), {0}):
        raise SavedCacheError("the cache has seen no tokens, so there is nothing to save; make a new one instead")
    if len(lengths) > 1:
        raise SavedCacheError(
            f"the layers have seen different numbers of tokens ({sorted(lengths)}), so a forward pass stopped "
            "half-way; reset() the cache and process the prompt again"
        )
    tensors: dict[str, Tensor] = {}
    layers = [_pack_layer(layer, f"layers.{index}.", tensors) for index, layer in enumerate(cache.layers)]
    rotary = None
    if cache.rotary is not None:
        tensors["rotary.inv_freq"] = cache.rotary.inv_freq
        rotary = {"scaling": cache.rotary.scaling, "interleaved": cache.rotary.interleaved}
    header = json.dumps(
        {
            "version": VERSION,
            "interval": cache.interval,
            "compressor": repr(cache.compressor),
            "storage": None if cache.storage is None else as_storage(cache.storage).form,
            "model": fingerprint(cache._pass.config),
            "rotary": rotary,
            "padding": cache._pass.columns.to_runs(),
            "layers": layers,
        }
    )
    disk.write(path, header, _alone(tensors))


def load_cache(
    kind: type[AnyCache],
    path: str | PathLike[str],
    compressor: Compressor,
    *,
    config: Any,
    storage: Storage | None = None,
    device: torch.device | str = "cpu",
    other_compressor: bool = False,
) -> AnyCache:
    """The cache of class ``kind`` that was saved in ``path``; goes on as the saved one would have.

    Everything is checked before anything is made: sizes and the header first, then what was read, in memory of our own,
    so that the cache does not depend on the file any more. The checksum finds damage, not malice; still, nothing in the
    file is executed, and a header that contradicts itself or its tensors is refused. Whether the weights are those of
    the saved cache's model cannot be seen from a configuration: a fine-tuned twin is not noticed.

    Args:
        kind: CentroidCache, or a subclass with the same arguments.
        path: the file.
        compressor: equal to the one it was made with.
        config: ``model.config`` of the model that goes on.
        storage: as it was saved with; ``Offloaded`` may be added or left out around another one.
        device: where attention runs.
        other_compressor: take a compressor with another ``repr`` for granted (one of your own stages may print its
            address, or you mean to go on with another budget).

    Raises:
        SavedCacheError: not a saved cache, damaged, of another version, model, compressor or storage.
        FileNotFoundError: no such file.
    """
    with disk.opened(path) as file:
        header = disk.parsed(file.metadata[HEADER], f"{path} is not a saved cache, or is damaged")
        schema.check_header(path, header, VERSION)
        _check_asked(path, header, compressor, config, storage, other_compressor)
        schema.check_names(path, header, file.entries)
        tensors = file.read()
    try:
        return _made(kind, path, header, tensors, compressor, config, storage, torch.device(device))
    except SavedCacheError:
        raise
    except Exception as error:  # a file with a right checksum, made by who knows what, and read by a storage of yours
        raise SavedCacheError(f"{path} cannot be continued: {type(error).__name__}: {error}") from error


def _check_asked(
    path: str | PathLike[str], header: dict[str, Any], compressor: Compressor, config: Any, storage: Storage | None,
    other_compressor: bool,
) -> None:  # fmt: skip
    """The file is of the model, compressor and storage that are to go on with it."""
    asked = fingerprint(config)
    if header["model"] != asked:
        differing = sorted(n for n in {*asked, *header["model"]} if asked.get(n) != header["model"].get(n))
        saved, here = ({n: fields.get(n) for n in differing} for fields in (header["model"], asked))
        raise SavedCacheError(f"{path} was saved with a model of {saved}, config= has {here}; load it with that model")
    if not other_compressor and header["compressor"] != repr(compressor):
        raise SavedCacheError(
            f"{path} was made by\n{header['compressor']}\nasked to go on with\n{compressor!r}\npass an equal one, or "
            "other_compressor=True if you mean it"
        )
    form = None if storage is None else as_storage(storage).form
    if header["storage"] != form:
        raise SavedCacheError(
            f"{path} holds its state as {header['storage']}, asked to go on with storage {form}; pass the same storage"
        )


def _made(
    kind: type[AnyCache], path: str | PathLike[str], header: dict[str, Any], tensors: Mapping[str, Tensor],
    compressor: Compressor, config: Any, storage: Storage | None, device: torch.device,
) -> AnyCache:  # fmt: skip
    rotary = None
    if header["rotary"] is not None:
        rotary = Rotary(_frequencies(tensors["rotary.inv_freq"]), **header["rotary"])
    cache = kind(compressor, header["interval"], config=config, rotary=rotary, storage=storage)
    if len(cache.layers) != len(header["layers"]):
        raise SavedCacheError(f"{path} holds {len(header['layers'])} layers, this model has {len(cache.layers)}")
    form = None
    for index, (layer, facts) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        form = _unpack_layer(layer, facts, f"layers.{index}.", tensors, device, form)
    cache._pass.columns = Columns.from_runs(header["padding"])
    return cache


def _frequencies(tensor: Tensor) -> Tensor:
    if tensor.ndim != 1 or not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
        raise SavedCacheError(f"rotary.inv_freq must be finite numbers [h], got {tuple(tensor.shape)}, {tensor.dtype}")
    return tensor


def _pack_layer(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put a layer's tensors among ``tensors``; returns what JSON can say of it."""
    if isinstance(layer, CentroidLayer):
        held, facts = layer.growing.pack()
        for number, one in enumerate(held):
            tensors |= {f"{prefix}{number}.{name}": tensor for name, tensor in one.tensors.items()}
        return {"compressed": facts, "held": [dict(one.facts) for one in held]}
    if getattr(layer, "record_past", False):
        raise SavedCacheError("a sliding window that records its past (assisted generation) cannot be saved")
    tensors |= {f"{prefix}keys": layer.keys, f"{prefix}values": layer.values}
    return {"sliding_window": layer.sliding_window, "cumulative_length": layer.cumulative_length}


def _unpack_layer(
    layer: Any, facts: dict[str, Any], prefix: str, tensors: Mapping[str, Tensor], device: torch.device,
    form: tuple[int, ...] | None,
) -> tuple[int, ...]:  # fmt: skip
    """Fill a layer; ``form`` is what this returned for the layer before."""
    where = prefix[:-1]
    if isinstance(layer, CentroidLayer) != ("compressed" in facts):
        raise SavedCacheError(f"{where} is {sorted(facts)} in the file, {type(layer).__name__} in this model")
    if isinstance(layer, CentroidLayer):
        held = []
        for number, own_facts in enumerate(facts["held"]):
            start = f"{prefix}{number}."
            named = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
            held.append(Held(named, own_facts))
        assert isinstance(layer.growing, GrowingState)  # no other is saved
        layer.growing.unpack(held, facts["compressed"], device)
        return schema.check_state(layer.growing, form, where)
    keys, values = (tensors[prefix + name].to(device) for name in ("keys", "values"))
    rows = schema.check_window(keys, values, facts, layer, where)
    if form not in (None, rows):
        raise SavedCacheError(f"{where} contradicts itself: its rows are not as many as those of other layers")
    layer.lazy_initialization(*(keys, values)[:WINDOW_TAKES])
    layer.keys, layer.values, layer.cumulative_length = keys, values, facts["cumulative_length"]
    return rows


def _alone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU and each in memory of its own, which is all that safetensors takes."""
    alone: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        mine = own(tensor.detach().cpu())
        alone[name] = mine.clone() if mine.data_ptr() in taken else mine
        taken.add(mine.data_ptr())
    return alone
