"""Selection through the public calls, against full scoring."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from conftest import exact_selection, fp8, small_problem
from hypothesis import given, settings, strategies as st

import dosa

WORDS = {
    "method": ["auto", "dense", "fused", "dosa"],
    "form": ["auto", "base", "absolute", "extended"],
    "precision": ["auto", "f32", "i8"],
    "seeds": ["auto", "nearest-spread", "chain", "largest-bounds"],
}


@st.composite
def problems(draw):
    nq, nk = draw(st.integers(0, 4)), draw(st.integers(0, 150))
    problem = small_problem(draw(st.integers(0, 999)), nq, nk, draw(st.integers(1, 9)), draw(st.sampled_from([32, 64, 128])))
    edges = st.lists(st.integers(-3, nk + 3), min_size=nq, max_size=nq)
    ks, ke = ((np.array(draw(edges), np.int32) if draw(st.booleans()) else None) for _ in range(2))
    return problem._replace(ks=ks, ke=ke)


@settings(max_examples=150, deadline=None)
@given(
    problems(),
    st.integers(1, 60),
    st.fixed_dictionaries({name: st.sampled_from(words) for name, words in WORDS.items()}),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_every_way_selects_what_a_full_sort_selects(problem, topk, words, ascending, relative, threads):
    arranged = {"order": "ascending" if ascending else "score", "index_space": "relative" if relative else "absolute"}
    ids, scores, stats = dosa.topk(*problem, topk=topk, threads=threads, **words, **arranged)
    want_ids, want_scores = exact_selection(problem, topk, ascending, relative)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(scores, want_scores)
    assert stats.rows == len(problem.q)
    assert dosa.verify(*problem, ids=ids, scores=scores, rows=None, **arranged).equal


@pytest.mark.parametrize("topk", [256, 2048])
def test_demo_trace_has_the_oracles_ids_and_score_bits(demo, topk):
    ids, scores, stats = dosa.topk(*demo, topk=topk)
    assert dosa.verify(*demo, ids=ids, scores=scores, rows=8) == (True, 8, [])
    assert stats.path.dosa == 128 and stats.refined < stats.visible // 5


def test_values_that_are_no_numbers_are_ranked(demo):
    """B1, B2, B5: +inf first, NaN after -inf, and NaN does fill a row."""
    q, w = fp8(np.eye(2, 32))[None], np.float32([[1, -1]])
    scale = np.float32([1, np.nan, np.inf, 2, np.nan, np.inf])
    k = np.repeat(fp8(np.eye(1, 32)), 6, 0)
    k[5] = fp8(np.eye(2, 32))[1]  # -inf
    ids, scores, _ = dosa.topk(q, k, scale, w, topk=8)
    np.testing.assert_array_equal(ids, [[2, 3, 0, 5, 1, 4, -1, -1]])
    assert scores.view(np.uint32)[0, 4:6].tolist() == [0x7FC00000, 0x7FC00000]


def test_any_strides_and_outputs_in_place(demo):
    want = dosa.topk(*demo, topk=64)
    k = np.asfortranarray(demo.k)
    wide = np.zeros((128, 64), np.float32)
    wide[:, ::2] = demo.w
    padded = np.full((130, 100), 77, np.int32)
    q = demo.q[::-1]
    order = {"ke": demo.ke[::-1]}
    got = dosa.topk(q, k, demo.k_scale, wide[::-1, ::2], topk=64, out=(padded[1:129, 3:67], None), **order)
    assert got.ids.base is padded and got.scores is None
    np.testing.assert_array_equal(padded[1:129, 3:67], want.ids[::-1])
    padded[1:129, 3:67] = 77
    assert (padded == 77).all()


def test_an_indexer_runs_often_in_a_dirty_workspace(demo):
    indexer = dosa.Indexer(method="dosa", threads=1)
    plan = indexer.plan_for(demo.q, demo.k, 128)
    assert (plan.nq, plan.nk, plan.heads, plan.dim, plan.topk) == (128, 32768, 32, 128, 128)
    workspace = dosa.empty_workspace(plan)
    want = dosa.topk(*demo, topk=128, method="dense")
    for poison in (0, 0xFF, 0x7F):
        workspace[:] = poison
        ids, scores = np.full((128, 128), poison, np.int32), np.full((128, 128), poison, np.float32)
        indexer.run(plan, *demo, ids=ids, scores=scores, workspace=workspace)
        np.testing.assert_array_equal(ids, want.ids)
        np.testing.assert_array_equal(scores.view(np.uint32), want.scores.view(np.uint32))


def test_other_python_threads_go_on_during_a_run(demo):
    started, done, seen = threading.Event(), [], []

    def select():
        started.set()
        for _ in range(4):  # most of a second
            dosa.topk(*demo, topk=2048, method="dense", threads=1)
        done.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that only a release hands the interpreter over
    try:
        worker = threading.Thread(target=select)
        worker.start()
        started.wait()
        seen.append(bool(done))
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == [False]


def test_threads_that_share_an_indexer_take_turns(demo):
    indexer = dosa.Indexer(threads=2)
    plan = indexer.plan_for(demo.q, demo.k, 64)
    want = dosa.topk(*demo, topk=64).ids
    results = [np.empty((128, 64), np.int32) for _ in range(4)]

    def select(ids):
        indexer.run(plan, *demo, ids=ids, workspace=dosa.empty_workspace(plan))

    workers = [threading.Thread(target=select, args=(ids,)) for ids in results]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    for ids in results:
        np.testing.assert_array_equal(ids, want)


P = small_problem(1, 2, 20, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk": 0}, dosa.ArgumentError, "topk is 0; allowed are 1 to 4096"),
        ({"topk": 4097}, dosa.ArgumentError, "topk is 4097"),
        ({"q": P.q.astype(np.float64)}, dosa.ArgumentError, "q has dtype float64"),
        ({"q": P.q.astype(np.float32)}, dosa.ArgumentError, "q is f32; it must be f8_e4m3"),
        ({"q": P.q[0]}, dosa.ArgumentError, r"q is a ndarray of 2 dimensions; it must be an array \[queries, heads, dim\]"),
        ({"q": [1, 2]}, dosa.ArgumentError, "q is a list of 0 dimensions"),
        ({"k": P.k[:, :16]}, dosa.ArgumentError, r"k has shape \[20, 16\]; it must be \[20, 32\]"),
        ({"k_scale": P.k_scale[:3]}, dosa.ArgumentError, r"k_scale has shape \[3\]; it must be \[20\]"),
        ({"w": None}, dosa.ArgumentError, "w "),
        ({"w": "weights"}, dosa.ArgumentError, "w is of type str"),
        ({"ks": np.zeros(2, np.int64)}, dosa.ArgumentError, "ks has dtype int64"),
        ({"ke": np.zeros(3, np.int32)}, dosa.ArgumentError, r"ke has shape \[3\]; it must be \[2\]"),
        ({"out": (np.empty((2, 5), np.int32), None)}, dosa.ArgumentError, r"ids has shape \[2, 5\]; it must be \[2, 4\]"),
        ({"out": (np.broadcast_to(np.int32(0), (2, 4)), None)}, dosa.ArgumentError, "ids is of type ndarray and is read-only"),
        ({"workspace": np.empty(3, np.uint8)}, dosa.ArgumentError, "workspace has 3 bytes; the plan needs"),
        ({"workspace": np.empty((3, 3), np.uint8)}, dosa.ArgumentError, "workspace must be a contiguous"),
        ({"method": "exact"}, dosa.ArgumentError, "method is 'exact'; allowed are auto, dense, fused, dosa"),
        ({"method": 3}, dosa.ArgumentError, "method is 3; it must be a word"),
        ({"threads": "two"}, dosa.ArgumentError, "threads is 'two'; it must be an integer"),
        ({"threads": -1}, dosa.ArgumentError, "threads is -1; allowed are 0 to"),
        ({"sped": 1}, dosa.ArgumentError, "there is no option 'sped'; there are method, backend, "),
        ({"topk": 2.5}, dosa.ArgumentError, "a size is no integer, or too large: .*topk is 2.5, "),
        ({"topk": 1 << 40}, dosa.ArgumentError, "a size is no integer, or too large: .*topk is 1099511627776, "),
        ({"implementation": "mmx"}, dosa.UnsupportedError, "mmx"),
        ({"memory_budget": 10}, dosa.UnsupportedError, "10"),
        ({"q": np.zeros((2, 4, 96), np.uint8)}, dosa.UnsupportedError, "dim is 96; the scorer has 32, 64 and 128"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(change, error, message):
    with pytest.raises(error, match=message) as caught:
        dosa.topk(**{**P._asdict(), "topk": 4, **change})
    assert "\n" not in str(caught.value) and isinstance(caught.value, dosa.Error)


def test_info_tells_what_is_here():
    info = dosa.info()
    assert info["version"] == dosa.__version__ and info["threads"] >= 1
    assert info["cpu_implementations"][-1] == "scalar"
    cpu, cuda = info["backends"]
    assert cpu == {"name": "cpu", "available": True, "reason": ""}
    assert cuda["name"] == "cuda" and cuda["available"] == (cuda["reason"] == "")
    if not cuda["available"]:
        with pytest.raises(dosa.UnsupportedError, match="cuda"):
            dosa.Indexer(backend="cuda")
