"""Rotary position embedding: how cached keys were rotated, so that they can be un-rotated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from centroidkv.errors import RotaryError


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotation that turned a key into the cached key of position p.

    Channel pair (x_i, x_{i+h}), h = number of frequencies, turns by the angle p * inv_freq_i and is scaled by
    ``scaling`` ("half" layout: Llama, Mistral, Qwen, Gemma, Phi-3; ``interleaved=True`` pairs x_{2i} with x_{2i+1}).
    Channels beyond 2h are not rotated (partial rotary embedding).

    Args:
        inv_freq: angular frequencies, shape ``[h]``, radians per token.
        scaling: factor that multiplied cos and sin (YaRN's attention factor); 1.0 for plain RoPE.
        interleaved: whether pairs are neighbouring channels.

    Source: Su et al., *RoFormer*, arXiv 2104.09864.

    >>> rotary = Rotary.from_theta(10_000.0, dim=8)
    >>> keys, positions = torch.randn(1, 2, 5, 8), torch.arange(5).expand(1, 2, 5)
    >>> bool(torch.allclose(rotary.unrotate(rotary.rotate(keys, positions), positions), keys, atol=1e-6))
    True
    """

    inv_freq: Tensor
    scaling: float = 1.0
    interleaved: bool = False

    @classmethod
    def from_theta(cls, theta: float, dim: int) -> Rotary:
        """Plain RoPE over ``dim`` channels: inv_freq_i = theta^(-2i/dim)."""
        if dim < 2 or dim % 2:
            raise RotaryError(f"RoPE rotates an even number of channels >= 2, got dim={dim}")
        exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        return cls((theta**-exponent).float())

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``keys [..., T, D]`` forward by ``positions [..., T]``; float32 result, float64 for float64 keys."""
        return self._turn(keys, positions, +1.0, self.scaling)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Undo :meth:`rotate`: the keys as they were before RoPE; float32 or float64 result."""
        return self._turn(keys, positions, -1.0, 1.0 / self.scaling)

    def rotate_ahead(self, queries: Tensor, start: Tensor, horizon: int) -> Tensor:
        """Mean of ``queries [B, H, Q, D]`` rotated to each of the ``horizon`` positions from ``start [B]`` on.

        float32 result, float64 for float64 queries.
        What all future positions agree on: channel pairs that turn fast average out, those that turn slowly stay.
        """
        steps = torch.arange(horizon, device=start.device) + start[:, None]
        cos, sin = (part.mean(1)[:, None, None] for part in self._angles(steps, queries.dtype))
        return self._apply(queries, cos * self.scaling, sin * self.scaling)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[..., h]`` of the angles at ``positions [...]``, float64 to turn float64 numbers."""
        # float32 angles are exact enough to 2^24 tokens only if the product is taken in float64 for large positions
        angle = (positions.double()[..., None] * self.inv_freq.to(positions.device).double()).float()
        angle = angle.to(_exact(dtype))  # the same angle, as models round it
        return angle.cos(), angle.sin()

    def _turn(self, keys: Tensor, positions: Tensor, sign: float, scaling: float) -> Tensor:
        cos, sin = self._angles(positions, keys.dtype)
        return self._apply(keys, cos * scaling, sin * (sign * scaling))

    def _apply(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.inv_freq.shape[0]
        if keys.shape[-1] < 2 * half:
            raise RotaryError(
                f"this rotary embedding turns {2 * half} channels, but the keys have only {keys.shape[-1]}; "
                "build it with the model's own rotary dimension"
            )
        turned, rest = (part.to(_exact(keys.dtype)) for part in (keys[..., : 2 * half], keys[..., 2 * half :]))
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned[..., :half], turned[..., half:]
        a, b = first * cos - second * sin, second * cos + first * sin
        out = torch.stack((a, b), -1).flatten(-2) if self.interleaved else torch.cat((a, b), -1)
        return torch.cat((out, rest), -1)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
