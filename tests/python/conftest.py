"""What the tests share: a shipped trace, made-up problems, and a reference written in NumPy alone."""

from __future__ import annotations

import pathlib

import ml_dtypes
import numpy as np
import pytest

import dosa

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRACES = ROOT / "traces"


@pytest.fixture(scope="session")
def demo() -> dosa.Problem:
    return dosa.load_trace(TRACES / "demo-h32.safetensors").problem


def fp8(values) -> np.ndarray:
    return np.asarray(values, np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def small_problem(seed: int, nq: int, nk: int, heads: int, dim: int = 32) -> dosa.Problem:
    """Small integers and powers of two: every sum of a score is exact in f32, in any order, and ties abound."""
    rng = np.random.default_rng(seed)
    return dosa.Problem(
        fp8(rng.integers(-2, 3, (nq, heads, dim))),
        fp8(rng.integers(-2, 3, (nk, dim))),
        (2.0 ** rng.integers(-2, 3, nk)).astype(np.float32),
        rng.choice(np.float32([-1, -0.5, 0, 0.5, 1, 2]), (nq, heads)),
    )


def exact_scores(problem: dosa.Problem) -> np.ndarray:
    """Scores of all keys, f64; exact for small_problem."""
    q = problem.q.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    k = problem.k.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    dots = np.maximum(np.einsum("qhd,kd->qhk", q, k), 0)
    return problem.k_scale * np.einsum("qh,qhk->qk", problem.w.astype(np.float64), dots)


def exact_selection(problem: dosa.Problem, topk: int, ascending: bool, relative: bool):
    """ids and scores by a full sort."""
    scores = exact_scores(problem)
    nq, nk = scores.shape
    ids = np.full((nq, topk), -1, np.int32)
    best = np.full((nq, topk), -np.inf, np.float32)
    for row in range(nq):
        first = max(0, problem.ks[row]) if problem.ks is not None else 0
        end = min(nk, problem.ke[row]) if problem.ke is not None else nk
        keys = np.arange(first, max(end, first))
        winners = keys[np.lexsort((keys, -scores[row, keys]))][:topk]
        if ascending:
            winners = np.sort(winners)
        ids[row, : len(winners)] = winners - (first if relative else 0)
        best[row, : len(winners)] = scores[row, winners]
    return ids, best
