"""A CentroidCache in one safetensors file: everything that the next token depends on."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from centroidkv.cache import Held, Storage
from centroidkv.cache.storage import as_storage, own
from centroidkv.compressor import Compressor
from centroidkv.errors import CacheError, SavedCacheError
from centroidkv.integrations.transformers.layer import CentroidLayer
from centroidkv.integrations.transformers.release import text_config
from centroidkv.rotary import Rotary

if TYPE_CHECKING:
    from centroidkv.integrations.transformers.cache import CentroidCache

VERSION = 1
HEADER, CHECKSUM = "centroidkv_cache", "sha256"
"""Names of the two entries in the file's metadata."""

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
    interrupted save leaves an older file whole.

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
            "model": fingerprint(cache._config),
            "rotary": rotary,
            "inner_padding": cache._inner_padding,
            "layers": layers,
        }
    )
    alone = _alone(tensors)
    final = Path(path)
    part = final.with_name(f".{final.name}.{secrets.token_hex(4)}.part")
    try:
        save_file(alone, part, metadata={HEADER: header, CHECKSUM: _checksum(header, alone)})
        with part.open("rb+") as written:
            os.fsync(written.fileno())
        part.replace(final)
    except SafetensorError as error:
        raise SavedCacheError(f"{final} cannot be written: {error}; what was there before is untouched") from error
    finally:
        part.unlink(missing_ok=True)


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

    Everything is checked before anything is made. The checksum finds damage, not malice; still, nothing in the file is
    executed. Whether the weights are those of the saved cache's model cannot be seen from a configuration: a
    fine-tuned twin is not noticed.

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
    header, tensors = _read(Path(path))
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
    rotary = None
    if header["rotary"] is not None:
        rotary = Rotary(tensors["rotary.inv_freq"], **header["rotary"])
    cache = kind(compressor, header["interval"], config=config, rotary=rotary, storage=storage)
    if len(cache.layers) != len(header["layers"]):
        raise SavedCacheError(f"{path} holds {len(header['layers'])} layers, this model has {len(cache.layers)}")
    for index, (layer, facts) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        _unpack_layer(layer, facts, f"layers.{index}.", tensors, torch.device(device))
    cache._inner_padding = header["inner_padding"]
    return cache


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
    layer: Any, facts: dict[str, Any], prefix: str, tensors: Mapping[str, Tensor], device: torch.device
) -> None:
    if isinstance(layer, CentroidLayer) != ("compressed" in facts):
        raise SavedCacheError(f"{prefix[:-1]} is {sorted(facts)} in the file, {type(layer).__name__} in this model")
    if isinstance(layer, CentroidLayer):
        held = []
        for number, own_facts in enumerate(facts["held"]):
            start = f"{prefix}{number}."
            named = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
            held.append(Held(named, own_facts))
        try:
            layer.growing.unpack(held, facts["compressed"], device)
        except (CacheError, KeyError) as error:
            raise SavedCacheError(f"{prefix[:-1]} cannot be gone on with: {error}") from error
        return
    keys, values = (tensors[prefix + name].to(device) for name in ("keys", "values"))
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, facts["cumulative_length"]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that is whole."""
    if not path.exists():
        raise FileNotFoundError(f"no saved cache at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if HEADER not in metadata:
                raise SavedCacheError(f"{path} is not a saved cache: a safetensors file without {HEADER!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        header = json.loads(metadata[HEADER])
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise SavedCacheError(f"{path} is not a saved cache, or is damaged or cut off: {error}") from error
    if header.get("version") != VERSION:
        raise SavedCacheError(
            f"{path} has format version {header.get('version')!r}, this release reads {VERSION}; use the release that "
            "wrote it, or process the prompt again"
        )
    if metadata.get(CHECKSUM) != _checksum(metadata[HEADER], tensors):
        raise SavedCacheError(f"{path} is damaged: its {CHECKSUM} is not the saved one; process the prompt again")
    return header, tensors


def _alone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU and each in memory of its own, which is all that safetensors takes."""
    alone: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        mine = own(tensor.detach().cpu())
        alone[name] = mine.clone() if mine.data_ptr() in taken else mine
        taken.add(mine.data_ptr())
    return alone


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the header and of every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
