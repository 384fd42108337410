"""Every error and warning the package raises, in one place.

All errors derive from :class:`CentroidKVError`, which is a ``ValueError``: code that already guards a call with
``except ValueError`` keeps working, and ``except CentroidKVError`` catches only ours. A message says what was asked,
what was got, and what would be right.
"""

__all__ = [
    "BackendError",
    "BackendWarning",
    "BudgetError",
    "BudgetNotMetWarning",
    "CacheError",
    "CentroidKVError",
    "CommandError",
    "DeviceError",
    "DtypeError",
    "EvaluationError",
    "GradientError",
    "MaskError",
    "ModelError",
    "NonFiniteError",
    "PositionOrderError",
    "RotaryError",
    "SavedCacheError",
    "ServingError",
    "ShapeError",
    "StageError",
]


class CentroidKVError(ValueError):
    """Base class of every error raised on purpose by this package."""


class ShapeError(CentroidKVError):
    """A tensor has the wrong rank, or two tensors do not fit together."""


class DtypeError(CentroidKVError):
    """A tensor has a data type the operation is not defined for, or two tensors that must share one do not."""


class DeviceError(CentroidKVError):
    """Tensors of one state live on different devices."""


class MaskError(DtypeError):
    """A padding mask does not say of every token whether it is real: an additive mask, or weights."""


class GradientError(CentroidKVError):
    """A tensor requires a gradient, and the operation would lose it."""


class NonFiniteError(CentroidKVError):
    """A live slot holds NaN or infinity, so no similarity is defined for it, or a result would leave its type."""


class PositionOrderError(CentroidKVError):
    """Slots are not sorted by position; neighbours, and so every partition, would be meaningless."""


class BudgetError(CentroidKVError):
    """A budget is malformed, or smaller than what must be preserved."""


class StageError(CentroidKVError):
    """A stage does not satisfy its protocol, or returned something its family must not return."""


class BackendWarning(UserWarning):
    """A back end found while it ran that the numbers are beyond it, and another one did the work."""


class BackendError(CentroidKVError):
    """The requested back end is unknown, unavailable, or would ignore the degrees."""


class RotaryError(CentroidKVError):
    """Keys must be un-rotated, but how they were rotated is not known."""


class CacheError(CentroidKVError):
    """An operation on a compressed cache has no exact answer (for instance un-merging merged slots)."""


class SavedCacheError(CentroidKVError):
    """A cache cannot be saved, or a file is not a saved cache that can be continued here."""


class ModelError(CentroidKVError):
    """A model cannot be loaded: its folder is damaged or absent, or it brings code of its own that may not run."""


class CommandError(CentroidKVError):
    """The command ``centroidkv`` is asked for what it cannot do: a prompt it cannot read, a picture it cannot write."""


class EvaluationError(CentroidKVError):
    """A benchmark request cannot be measured as asked: unknown preset, no question to split off, prompt too long."""


class ServingError(CentroidKVError):
    """A serving engine is configured in a way in which clustering its caches would be impossible or wrong."""


class BudgetNotMetWarning(UserWarning):
    """A result holds more slots than its budget: merging stopped earlier, or a model has no layer to compress."""
