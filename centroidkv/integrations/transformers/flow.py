"""What an attention module does between the cache and the attention function, read off its source.

Stock attention calls nothing of ours, so nothing can look at the keys and values that arrive there. Where a cache is
used without ``enable``, the module's ``forward`` has to show that they are the ones the cache returned.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Hashable
from functools import cache
from typing import Any

REGROUPS = "changes keys or values after the cache (regroups heads, for instance)"
"""Harmless where all heads hold the same clusters, if the module only regroups."""


@cache
def why_not_straight(kind: Hashable) -> str | None:
    """Why attention modules of this class cannot be handed degrees by their keyword arguments alone; None if they can.

    They can if ``forward`` assigns ``k, v = ....update(..., kwargs=kwargs)`` and hands just these on, together with
    ``**kwargs`` and the ``attention_mask`` it was given, to the attention function, without a ``position_bias``.
    """
    tree = _forward_of(kind)
    if tree is None:
        return "has no source to be read"
    updates = [node for node in ast.walk(tree) if _is_update(node)]
    if not updates:
        return "does not show what it does with the keys and values that the cache returns"
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _passes_on(node)]
    for update in updates:
        assert isinstance(update, ast.Assign)  # by _is_update
        assert isinstance(update.targets[0], ast.Tuple)
        names = [name.id for name in update.targets[0].elts if isinstance(name, ast.Name)]
        later = [call for call in calls if call.lineno > update.lineno]
        if not later:
            return "does not hand its keyword arguments on to an attention function"
        for call in later:
            if any(keyword.arg == "position_bias" for keyword in call.keywords):
                return "adds a bias of its own for how far apart tokens are (position_bias), counted in slots"
            until = (update.end_lineno or update.lineno, call.lineno)
            mask = _argument(call, "attention_mask")
            if not (isinstance(mask, ast.Name) and mask.id == "attention_mask") or _assigned(tree, [mask.id], *until):
                return "makes a mask of its own"
            handed = [argument.id if isinstance(argument, ast.Name) else None for argument in _keys_and_values(call)]
            if handed != names or _assigned(tree, names, *until):
                return REGROUPS
    return None


@cache
def feeds_a_cache(kind: Hashable) -> bool:
    """Whether this is a class of modules whose own ``forward`` appends keys and values to a cache."""
    if not isinstance(kind, type) or "forward" not in vars(kind):
        return False
    tree = _forward_of(kind)
    return tree is not None and any(_is_update(node) for node in ast.walk(tree))


def _forward_of(kind: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return None


def _is_update(node: ast.AST) -> bool:
    """``k, v = cache.update(...)``"""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "update"
        and isinstance(node.targets[0], ast.Tuple)
        and len(node.targets[0].elts) == 2
    )


def _passes_on(call: ast.Call) -> bool:
    """``f(self, query, key, value, ..., **kwargs)``"""
    first = call.args[0] if call.args else None
    return (
        isinstance(first, ast.Name)
        and first.id == "self"
        and len(_keys_and_values(call)) == 2
        and any(keyword.arg is None for keyword in call.keywords)
    )


PARAMETERS = ("module", "query", "key", "value", "attention_mask")
"""Of every attention function, in order."""


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    return dict(zip(PARAMETERS, call.args, strict=False)).get(name, named.get(name))


def _keys_and_values(call: ast.Call) -> list[ast.expr]:
    return [argument for name in ("key", "value") if (argument := _argument(call, name)) is not None]


def _assigned(tree: ast.AST, names: list[str], after: int, before: int) -> bool:
    """Whether one of ``names`` is given another value on a line after ``after`` and before ``before``."""
    return any(
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and node.id in names
        and after < node.lineno < before
        for node in ast.walk(tree)
    )


@cache
def attends_by_interface(kind: Hashable) -> bool:
    """Whether ``forward`` calls an attention function at all: ``f(self, query, key, value, ...)``; True if unreadable.

    Modules that multiply queries and keys by themselves are out of reach for any attention function.
    """
    tree = _forward_of(kind)
    return tree is None or any(
        isinstance(node, ast.Call)
        and isinstance(_argument(node, "module"), ast.Name)
        and getattr(_argument(node, "module"), "id", None) == "self"
        and len(_keys_and_values(node)) == 2
        for node in ast.walk(tree)
    )
