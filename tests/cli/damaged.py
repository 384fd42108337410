"""A copy of a model with one thing wrong."""

from __future__ import annotations


def damage(folder, how, tmp_path):
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = copy / "model.safetensors"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "none":
        weights.unlink()
    elif how == "no json":
        (copy / "config.json").write_text("{")
    elif how == "no tokenizer":
        (copy / "tokenizer.json").write_text('{"version": "1.0"}')
    elif how == "unknown":
        (copy / "config.json").write_text('{"model_type": "no such type"}')
    elif how == "text":
        weights.write_text("not weights")
    return copy
