"""Positions of tokens: angles of rotary embeddings, biases of ALiBi.

A model's `forward` passes positions; its attention takes cosines and sines, or a bias.
Shape suffixes: B batch, L tokens, S tokens attended to, H query heads of this rank, K width of a
head.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tokamake.config.architecture import Architecture
from tokamake.config.rope_scaling import RopeScaling


def rotary(
    positions: Tensor,
    architecture: Architecture,
    dtype: torch.dtype = torch.float32,
    *,
    longest: int = 0,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding (arXiv 2104.09864).

    Every forward pass computes them again: a cast of the model to bf16 would round a buffer.

    Args:
        positions: (L,) for all rows, or (B, L).
        longest: tokens of the longest row that may come; longrope depends on it.

    Returns:
        (L, K) each, or (B, 1, L, K), for `rotate`; K is the part of a head that rotates. With a
        `local_rope_theta`, (2, ...): of layers without a window, then of layers with one.
    """
    frequencies, factor = rotary_frequencies(architecture, positions.device, longest=longest)
    cos, sin = _cosines_and_sines(positions, frequencies, factor=factor)
    if architecture.local_rope_theta:
        theta, device = architecture.local_rope_theta, positions.device
        local = _plain_frequencies(architecture, theta, device=device)
        of_windows = _cosines_and_sines(positions, local)
        cos, sin = (torch.stack(pair) for pair in zip((cos, sin), of_windows, strict=True))
    return cos.to(dtype), sin.to(dtype)


def _cosines_and_sines(
    positions: Tensor, frequencies: Tensor, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    # Angles are fp32: positions beyond 256 are not exact in bf16.
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    if positions.dim() > 1:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos, sin


def rotate(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Rotate each head by the angles of its position; pairs are (i, i + K/2) as in Hugging Face.

    Angles may be narrower than heads: the rest of each head does not rotate.
    """
    width = cos_LK.shape[-1]
    if torch.compiler.is_compiling():
        # The compiler fuses the formula itself.
        turned, rest = x_BHLK[..., :width], x_BHLK[..., width:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos_LK + torch.cat((-second, first), dim=-1) * sin_LK
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
    half = width // 2
    if not torch.is_grad_enabled():
        return _rotated(x_BHLK, cos_LK[..., :half], sin_LK[..., :half], 1)
    y_BHLK: Tensor = _Rotate.apply(x_BHLK, cos_LK[..., :half], sin_LK[..., :half])
    return y_BHLK


class _Rotate(torch.autograd.Function):
    """Rotation with half the memory traffic of autograd's; on CPUs, traffic is the cost."""

    @staticmethod
    def forward(ctx: Any, x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
        ctx.save_for_backward(cos_LK, sin_LK)
        return _rotated(x_BHLK, cos_LK, sin_LK, 1)

    @staticmethod
    def backward(ctx: Any, grad_BHLK: Tensor) -> tuple[Tensor, None, None]:
        cos_LK, sin_LK = ctx.saved_tensors
        return _rotated(grad_BHLK, cos_LK, sin_LK, -1), None, None


def _rotated(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor, sign: int) -> Tensor:
    # In the layout of the input: attention and its output take it over without copies.
    y_BHLK, width = torch.empty_like(x_BHLK), 2 * cos_LK.shape[-1]
    (first, second), (left, right) = (
        each[..., :width].chunk(2, dim=-1) for each in (x_BHLK, y_BHLK)
    )
    torch.mul(first, cos_LK, out=left).addcmul_(second, sin_LK, value=-sign)
    torch.mul(second, cos_LK, out=right).addcmul_(first, sin_LK, value=sign)
    if width < x_BHLK.shape[-1]:
        y_BHLK[..., width:] = x_BHLK[..., width:]
    return y_BHLK


def rotary_frequencies(
    architecture: Architecture, device: torch.device | None = None, *, longest: int = 0
) -> tuple[Tensor, float]:
    """Angles per position, (rotary width / 2,) fp32, and the factor of cosines and sines."""
    plain = _plain_frequencies(architecture, architecture.rope_theta, device=device)
    scaling = architecture.rope_scaling
    if scaling is None or scaling.rope_type == "dynamic":
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.rope_type == "longrope":
        return _longrope(plain, scaling, longest=longest)
    return _yarn(plain, architecture.rope_theta, scaling=scaling), _yarn_attention_factor(scaling)


def _plain_frequencies(
    architecture: Architecture, theta: float, *, device: torch.device | None
) -> Tensor:
    width = architecture.rotary_width
    even = torch.arange(0, width, 2, device=device).float()
    return 1.0 / theta ** (even / width)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch low frequencies, keep high ones, interpolate between them (arXiv 2407.21783)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None
    assert high is not None
    turns = _length(scaling) * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _longrope(plain: Tensor, scaling: RopeScaling, *, longest: int) -> tuple[Tensor, float]:
    """Divide each frequency by its own factor (arXiv 2402.13753).

    All tokens of a row need the same factors: keys of earlier tokens are rotated already.
    """
    original = _length(scaling)
    factors = scaling.long_factor if longest > original else scaling.short_factor
    assert factors is not None
    sharpened = scaling.attention_factor
    if sharpened is None:
        sharpened = math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    return plain / torch.tensor(factors, device=plain.device), sharpened


def _yarn(plain: Tensor, theta: float, *, scaling: RopeScaling) -> Tensor:
    """Stretch pairs along a ramp over their numbers (arXiv 2309.00071, section 3.2)."""
    width = 2 * len(plain)

    def pair(turns: float) -> float:
        """Number of the pair with `turns` full turns in a sequence of the first training."""
        wavelength = _length(scaling) / (2 * math.pi * turns)
        return width * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast or 32.0), pair(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # as transformers does, against a division by zero
    numbers = torch.arange(len(plain), device=plain.device).float()
    stretched = ((numbers - first) / (last - first)).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """Factor of queries and of keys, which sharpens the scores of attention."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    log = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (scaling.mscale * log + 1) / (scaling.mscale_all_dim * log + 1)
    return log + 1


def yarn_score_factor(scaling: RopeScaling | None) -> float:
    """Factor of scores of latent attention, beside that of cosines and sines (DeepSeek-V2)."""
    if scaling is None or scaling.rope_type != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


def _length(scaling: RopeScaling) -> int:
    assert scaling.original_max_position_embeddings is not None
    return scaling.original_max_position_embeddings


def alibi_slopes(num_heads: int) -> list[float]:
    """Attention score that each head loses per token of distance (arXiv 2108.12409).

    A geometric series; heads beyond a power of 2 get every other term of the next longer series.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    return slopes + [2 ** (-4 * n / power) for n in range(1, 2 * (num_heads - power), 2)]


def alibi(
    num_heads: int,
    heads: range,
    *,
    positions: Tensor,
    total: int,
    like: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Bias of attention scores: lower with distance, -inf for tokens that are not seen.

    Args:
        heads: of this rank.
        positions: (L,) or (B, L) places of the tokens that attend.
        mask: (B, 1, L, S) bool; None: each token sees itself and earlier tokens.

    Returns:
        (1 or B, H, L, S).
    """
    keys_S = torch.arange(total, device=like.device)
    distance_BLS = torch.atleast_2d(positions)[..., None] - keys_S
    slopes = torch.tensor(alibi_slopes(num_heads)[heads.start : heads.stop], device=like.device)
    bias_BHLS = -slopes[:, None, None] * distance_BLS[:, None]
    hidden = distance_BLS[:, None] < 0 if mask is None else ~mask
    return bias_BHLS.masked_fill(hidden, -math.inf).to(like.dtype)
