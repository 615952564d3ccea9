"""From hidden states to indexer inputs, as DeepSeek-V3.2 and GLM-5.2 make them: a plain reference in NumPy.

    queries:  wq_b(q_resid) -> heads -> RoPE on the first dims -> Hadamard -> FP8 rows and scales; scales go into w
    keys:     wk(hidden) -> LayerNorm -> RoPE on the first dims -> Hadamard -> FP8 rows and scales

Everything is computed in f32; a model that computes in bf16 rounds more often. It is here to be read and compared with,
not to be fast. What goes wrong most often, and is refused or tested here: the RoPE layout, rotating only one of q and k, and
scales left out of w.

References
----------
DeepSeek-V3.2-Exp, inference/model.py, class Indexer; transformers, models/deepseek_v32 and models/glm_moe_dsa.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from ._errors import ArgumentError
from ._trace import Problem

Rope = Literal["half", "interleaved"]

ROPE: dict[str, Rope] = {"deepseek_v32": "half", "glm_moe_dsa": "interleaved"}
"""RoPE layout of each model's indexer. DeepSeek-V3.2's differs from that of its attention."""

E4M3_MAX = 448.0


class Weights(NamedTuple):
    """An indexer's parameters, as checkpoints store them (rows are outputs).

    Attributes
    ----------
    wq_b : float [heads * dim, q_lora_rank]
    wk : float [dim, hidden]
    k_norm_weight, k_norm_bias : float [dim]
        Of the LayerNorm over a key; epsilon is 1e-6.
    weights_proj : float [heads, hidden]
    """

    wq_b: np.ndarray
    wk: np.ndarray
    k_norm_weight: np.ndarray
    k_norm_bias: np.ndarray
    weights_proj: np.ndarray


class Queries(NamedTuple):
    """q uint8 [n, heads, dim] (FP8 E4M3), w float32 [n, heads] with every scale folded in, and whether q is rotated."""

    q: np.ndarray
    w: np.ndarray
    rotated: bool


class Keys(NamedTuple):
    """k uint8 [n, dim] (FP8 E4M3), k_scale float32 [n], and whether k is rotated."""

    k: np.ndarray
    k_scale: np.ndarray
    rotated: bool


def prepare_queries(
    weights: Weights,
    hidden: np.ndarray,
    q_resid: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    rope: Rope,
    rotate: bool = True,
    power_of_two: bool = True,
) -> Queries:
    """FP8 queries and head weights.

    Parameters
    ----------
    weights : Weights
    hidden : float [n, hidden]
        Hidden states; the head weights come from them.
    q_resid : float [n, q_lora_rank]
        Normalised low-rank query of the attention, q_a_layernorm(q_a_proj(hidden)).
    cos, sin : float [n, rope_dim / 2]
        Of each position's angles, see `rope_angles`. The first rope_dim components are turned.
    rope : {"half", "interleaved"}
        Layout of the turned pairs, see `ROPE`.
    rotate : bool
        Whether rows go through the Hadamard rotation; keys must do the same.
    power_of_two : bool
        Whether scales are powers of two (UE8M0), as DeepSeek's scale_fmt "ue8m0" says.

    Returns
    -------
    Queries
        w = weights_proj(hidden) * heads^-1/2 * dim^-1/2 * scale of each FP8 row.
    """
    heads, dim = weights.weights_proj.shape[0], weights.wk.shape[0]
    x = q_float(weights, q_resid, cos, sin, rope)
    q, q_scale = quantize(hadamard(x) if rotate else x, power_of_two)
    w = np.asarray(hidden, np.float32) @ np.asarray(weights.weights_proj, np.float32).T
    return Queries(q, (w * np.float32(heads**-0.5) * q_scale * np.float32(dim**-0.5)).astype(np.float32), rotate)


def prepare_keys(
    weights: Weights,
    hidden: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    rope: Rope,
    rotate: bool = True,
    power_of_two: bool = True,
) -> Keys:
    """FP8 keys and their scales; parameters as `prepare_queries`."""
    x = k_float(weights, hidden, cos, sin, rope)
    k, k_scale = quantize(hadamard(x) if rotate else x, power_of_two)
    return Keys(k, k_scale, rotate)


def problem(queries: Queries, keys: Keys, ks: np.ndarray | None = None, ke: np.ndarray | None = None) -> Problem:
    """What `dosa.topk` takes.

    Raises
    ------
    ArgumentError
        One of q and k is rotated and the other is not: their products would mean nothing.
    """
    if queries.rotated != keys.rotated:
        words = {True: "rotated", False: "not rotated"}
        raise ArgumentError(f"q is {words[queries.rotated]} and k is {words[keys.rotated]}; both or neither must be")
    return Problem(queries.q, keys.k, keys.k_scale, queries.w, ks, ke)


def q_float(weights: Weights, q_resid: np.ndarray, cos: np.ndarray, sin: np.ndarray, rope: Rope) -> np.ndarray:
    """Queries before rotation and quantisation, float32 [n, heads, dim]."""
    dim = weights.wk.shape[0]
    q = np.asarray(q_resid, np.float32) @ np.asarray(weights.wq_b, np.float32).T
    return turn(q.reshape(len(q), -1, dim), cos[:, None], sin[:, None], rope)


def k_float(weights: Weights, hidden: np.ndarray, cos: np.ndarray, sin: np.ndarray, rope: Rope) -> np.ndarray:
    """Keys before rotation and quantisation, float32 [n, dim]."""
    k = np.asarray(hidden, np.float32) @ np.asarray(weights.wk, np.float32).T
    return turn(layer_norm(k, weights.k_norm_weight, weights.k_norm_bias), cos, sin, rope)


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last axis. Keys have a LayerNorm, not an RMSNorm."""
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    return (centred / scale * weight + bias).astype(np.float32)


def rope_angles(positions: np.ndarray, rope_dim: int = 64, theta: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of plain RoPE, float32 [n, rope_dim / 2]: angle j is position * theta^(-2j / rope_dim).

    A model with scaled frequencies (YaRN) has its own; take the first half of the last axis of its cos and sin.
    """
    frequency = theta ** (-np.arange(0, rope_dim, 2) / rope_dim)
    angle = np.asarray(positions, np.float64)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, rope: Rope) -> np.ndarray:
    """RoPE: turns the first 2 m components of the last axis, m = cos.shape[-1], in pairs; the others stay.

    Pair j is (j, j + m) in layout "half" and (2 j, 2 j + 1) in layout "interleaved"; (a, b) becomes
    (a cos - b sin, b cos + a sin). Components stay where they are in both.
    """
    m = cos.shape[-1]
    if rope == "half":
        first, second = slice(0, m), slice(m, 2 * m)
    elif rope == "interleaved":
        first, second = slice(0, 2 * m, 2), slice(1, 2 * m, 2)
    else:
        raise ArgumentError(f"rope is '{rope}'; allowed are half, interleaved")
    if x.shape[-1] < 2 * m:
        raise ArgumentError(f"rows have {x.shape[-1]} components; cos turns the first {2 * m}")
    turned = np.array(x, np.float32)
    a, b = x[..., first], x[..., second]
    turned[..., first] = a * cos - b * sin
    turned[..., second] = b * cos + a * sin
    return turned


def hadamard(x: np.ndarray) -> np.ndarray:
    """x H / sqrt(dim) over the last axis, H the Hadamard matrix in Sylvester's order; dim a power of two.

    Orthogonal, so products of two rotated rows are those of the rows; it spreads outliers before quantisation.
    """
    dim = x.shape[-1]
    if dim == 0 or dim & (dim - 1):
        raise ArgumentError(f"rows have {dim} components; the Hadamard rotation needs a power of two")
    y = np.array(x, np.float32)
    half = 1
    while half < dim:
        pairs = y.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        y = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        half *= 2
    return y.reshape(x.shape) * np.float32(dim**-0.5)


def quantize(x: np.ndarray, power_of_two: bool = True, floor: float = 1e-4) -> tuple[np.ndarray, np.ndarray]:
    """Rows to FP8 E4M3 with one scale each.

    Parameters
    ----------
    x : float [..., dim]
    power_of_two : bool
        Whether scales are rounded up to powers of two (UE8M0).
    floor : float
        Least amax; keeps all-zero rows from a zero scale. DeepGEMM has 1e-4, vLLM 1e-10.

    Returns
    -------
    (uint8 [..., dim], float32 [...])
        x is close to bytes * scale, scale = max(amax, floor) / 448. Non-finite components take no part in amax; infinities
        saturate, NaN stays NaN.
    """
    x = np.asarray(x, np.float32)
    magnitude = np.where(np.isfinite(x), np.abs(x), 0)
    amax = np.maximum(magnitude.max(axis=-1, initial=0), np.float32(floor))
    scale = (amax / np.float32(E4M3_MAX)).astype(np.float32)
    if power_of_two:
        scale = ((scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)
    return encode_e4m3(x / scale[..., None]), scale


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest E4M3 bytes, ties to even, saturating at +-448; NaN becomes 0x7F."""
    x = np.asarray(x, np.float32)
    magnitude = np.minimum(np.abs(x), np.float32(E4M3_MAX))
    _, exponent = np.frexp(magnitude)  # magnitude = f 2^exponent, 1/2 <= f < 1
    # Steps between neighbouring bytes: 2^-9 below 2^-6 (subnormal), then an eighth of the power of two below.
    step = np.maximum(exponent - 1, -6) - 3
    steps = np.rint(np.ldexp(magnitude, -step))  # to even; at most 16, which is the next exponent's 8
    with np.errstate(invalid="ignore"):
        code = np.where(steps < 8, steps, (step + 9) * 8 + steps).astype(np.uint8)
    signed = code | (np.signbit(x).astype(np.uint8) << 7)
    return np.where(np.isnan(x), np.uint8(0x7F), signed)
