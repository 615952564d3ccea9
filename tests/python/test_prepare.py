"""Preparation: what users get wrong (known-failures, kind K) must show."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import dosa
from dosa import prepare

RNG = np.random.default_rng(7)
HEADS, DIM, HIDDEN, RANK = 4, 128, 96, 48


@pytest.fixture(scope="module")
def weights():
    def gauss(*shape):
        return RNG.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    return prepare.Weights(gauss(HEADS * DIM, RANK), gauss(DIM, HIDDEN), 1 + gauss(DIM), gauss(DIM), gauss(HEADS, HIDDEN))


def activations(n):
    return RNG.normal(size=(n, HIDDEN)).astype(np.float32), RNG.normal(size=(n, RANK)).astype(np.float32)


def decode(codes):
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@settings(max_examples=300)
@given(hnp.arrays(np.float32, 16, elements=st.floats(width=32, allow_nan=True, allow_infinity=True)))
def test_encoding_is_that_of_ml_dtypes(x):
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(prepare.encode_e4m3(x) & 0x7F, want & 0x7F)
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(prepare.encode_e4m3(x)[finite], want[finite])


def test_every_byte_and_every_tie_encodes_right():
    values = decode(np.arange(127, dtype=np.uint8))
    np.testing.assert_array_equal(prepare.encode_e4m3(values), np.arange(127))
    middle = (values[:-1] + values[1:]) / 2
    np.testing.assert_array_equal(prepare.encode_e4m3(middle), (np.arange(126) + 1) // 2 * 2)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_come_back_within_half_a_step(power_of_two):
    x = RNG.normal(size=(50, DIM)).astype(np.float32) * 10.0 ** RNG.integers(-6, 6, (50, 1))
    codes, scale = prepare.quantize(x, power_of_two)
    amax = np.maximum(np.abs(x).max(-1), 1e-4)
    assert (scale * 448 >= amax * (1 - 1e-6)).all() and (scale * 448 < 2.0001 * amax).all()
    if power_of_two:
        assert (np.frexp(scale)[0] == 0.5).all()
    error = np.abs(decode(codes) * scale[:, None] - x)
    assert (error <= np.maximum(np.abs(x) / 16, scale[:, None] * 2.0**-10) * 1.0001).all()


def test_bad_components_spare_the_others():
    """B8: an all-zero row has a scale; one NaN or infinity does not erase a row."""
    codes, scale = prepare.quantize(np.float32([[0, 0], [np.nan, 2], [np.inf, 2]]), power_of_two=False)
    np.testing.assert_array_equal(codes, [[0, 0], [0x7F, 0x7E], [0x7E, 0x7E]])
    np.testing.assert_array_equal(scale, np.float32([1e-4, 2, 2]) / np.float32(448))


@pytest.mark.parametrize(("rope", "partner"), [("half", 32), ("interleaved", 1)])
def test_rope_turns_the_pairs_of_its_layout(rope, partner):
    """K1: one-hot rows."""
    cos, sin = prepare.rope_angles(np.array([3]))
    x = np.eye(1, DIM, dtype=np.float32)
    want = np.zeros((1, DIM), np.float32)
    want[0, 0], want[0, partner] = np.cos(3), np.sin(3)
    np.testing.assert_allclose(prepare.turn(x, cos, sin, rope), want, atol=1e-6)
    rest = np.eye(DIM, dtype=np.float32)[64:]
    np.testing.assert_array_equal(prepare.turn(rest, cos, sin, rope), rest)


@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_products_depend_on_the_distance_alone(rope):
    q, k = RNG.normal(size=(2, 1, DIM)).astype(np.float32)
    near, far = (
        float((prepare.turn(q, *at(m), rope) @ prepare.turn(k, *at(n), rope).T)[0, 0])
        for at in [lambda p: prepare.rope_angles(np.array([p]))]
        for m, n in [(9, 4), (1009, 1004)]
    )
    assert near == pytest.approx(far, abs=1e-3)
    mixed = "half" if rope == "interleaved" else "interleaved"
    at = lambda p: prepare.rope_angles(np.array([p]))  # noqa: E731
    wrong = float((prepare.turn(q, *at(9), rope) @ prepare.turn(k, *at(4), mixed).T)[0, 0])
    assert abs(wrong - near) > 0.1


def test_hadamard_is_the_matrix_and_keeps_products():
    h = np.array([[1.0]])
    while len(h) < DIM:
        h = np.block([[h, h], [h, -h]])
    x = RNG.normal(size=(5, DIM)).astype(np.float32)
    rotated = prepare.hadamard(x)
    np.testing.assert_allclose(rotated, x @ h / np.sqrt(DIM), atol=1e-5)
    np.testing.assert_allclose(rotated @ rotated.T, x @ x.T, atol=1e-4)
    with pytest.raises(dosa.ArgumentError, match="96 components"):
        prepare.hadamard(x[:, :96])


def test_rotating_one_side_only_is_refused(weights):
    """K2."""
    hidden, q_resid = activations(3)
    cos, sin = prepare.rope_angles(np.arange(3))
    queries = prepare.prepare_queries(weights, hidden, q_resid, cos, sin, rope="half")
    keys = prepare.prepare_keys(weights, hidden, cos, sin, rope="half", rotate=False)
    with pytest.raises(dosa.ArgumentError, match="q is rotated and k is not rotated"):
        prepare.problem(queries, keys)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_scores_are_those_of_the_unquantised_indexer(weights, rope, rotate, power_of_two):
    """K3, K5: the sum over heads of weighted ReLUs, up to FP8; len = K is the identity, at K + 1 the least goes."""
    n = 65
    hidden, q_resid = activations(n)
    cos, sin = prepare.rope_angles(np.arange(n))
    how = {"rope": rope, "rotate": rotate, "power_of_two": power_of_two}
    causal = np.arange(1, n + 1, dtype=np.int32)
    queries = prepare.prepare_queries(weights, hidden, q_resid, cos, sin, **how)
    problem = prepare.problem(queries, prepare.prepare_keys(weights, hidden, cos, sin, **how), ke=causal)

    x, y = prepare.q_float(weights, q_resid, cos, sin, rope), prepare.k_float(weights, hidden, cos, sin, rope)
    w = hidden @ weights.weights_proj.T / np.sqrt(HEADS * DIM)
    want = np.einsum("qh,qhk->qk", w, np.maximum(np.einsum("qhd,kd->qhk", x, y), 0))
    # A component is off by at most a sixteenth of itself, or half a subnormal step of its row; products follow.
    x, y = (np.abs(prepare.hadamard(z) if rotate else z) for z in (x, y))
    dx, dy = (z / 16 + prepare.quantize(z, power_of_two)[1][..., None] * 2.0**-10 for z in (x, y))
    off = np.einsum("qhd,kd->qhk", x + dx, y + dy) - np.einsum("qhd,kd->qhk", x, y)
    got = dosa.scores(*problem)
    seen = np.arange(n) < causal[:, None]
    assert (np.abs(got - want) <= np.einsum("qh,qhk->qk", np.abs(w), off) * 1.001)[seen].all()
    assert np.corrcoef(got[seen], want[seen])[0, 1] > 0.99

    ids = dosa.topk(*problem, topk=64, order="ascending").ids
    np.testing.assert_array_equal(ids[63], np.arange(64))
    assert set(range(65)) - set(ids[64]) == {64 - int(np.argmin(got[64, ::-1]))}  # of equal ones the last


@pytest.mark.parametrize(
    ("model", "indexer", "config"),
    [
        ("deepseek_v32", "DeepseekV32Indexer", "DeepseekV32Config"),
        ("glm_moe_dsa", "GlmMoeDsaIndexer", "GlmMoeDsaConfig"),
    ],
)
def test_transformers_selects_the_same_from_the_same_weights(weights, model, indexer, config):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import importlib

    modelling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    settings = dict(
        hidden_size=HIDDEN, index_n_heads=HEADS, index_head_dim=DIM, qk_rope_head_dim=64, index_topk=10, q_lora_rank=RANK
    )
    module = getattr(modelling, indexer)(getattr(transformers, config)(**settings), 0)
    names = ["wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"]
    module.load_state_dict({name: torch.from_numpy(w) for name, w in zip(names, weights)})

    n = 40
    hidden, q_resid = activations(n)
    cos, sin = prepare.rope_angles(np.arange(n))
    twice = [torch.from_numpy(np.concatenate([x, x], -1))[None] for x in (cos, sin)]
    mask = torch.from_numpy(np.tril(np.ones((1, n, n), bool)))
    theirs = module(torch.from_numpy(hidden)[None], torch.from_numpy(q_resid)[None], tuple(twice), mask, None)[0].numpy()

    rope = prepare.ROPE[model]
    q, k = prepare.q_float(weights, q_resid, cos, sin, rope), prepare.k_float(weights, hidden, cos, sin, rope)
    scores = np.einsum("qh,qhk->qk", hidden @ weights.weights_proj.T, np.maximum(np.einsum("qhd,kd->qhk", q, k), 0))
    for row in range(10, n):
        ours = np.argsort(-scores[row, : row + 1], kind="stable")[:10]
        assert set(ours) == set(theirs[row])
