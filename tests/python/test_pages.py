"""Keys in pages: the same selection as from contiguous keys, and the calls that write caches."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import exact_selection, small_problem

import dosa
from dosa import dropin, pages


def paged(seed: int, lens, page_size: int = 16, dim: int = 32, heads: int = 4):
    """A step of decoding, and the same as one problem with contiguous keys for each request. Scores have one value."""
    rng = np.random.default_rng(seed)
    lens = np.asarray(lens, np.int32)
    batch, next_n = lens.shape
    blocks = int(max(lens.max(), 1) - 1) // page_size + 2
    pool = pages.empty_pool(batch * blocks + 3, page_size, dim)
    table = rng.permutation(len(pool))[: batch * blocks].astype(np.int32).reshape(batch, blocks)
    room = blocks * page_size
    contiguous = [small_problem(seed + b, next_n, room, heads, dim) for b in range(batch)]
    contiguous = [problem._replace(ke=lens[b]) for b, problem in enumerate(contiguous)]
    bytes_of = pool.reshape(len(pool), -1)
    for b, problem in enumerate(contiguous):
        for i, page in enumerate(table[b]):
            part = slice(i * page_size, (i + 1) * page_size)
            bytes_of[page, : page_size * dim] = problem.k[part].ravel()
            bytes_of[page, page_size * dim :] = problem.k_scale[part].view(np.uint8)
    q = np.stack([problem.q for problem in contiguous])
    w = np.concatenate([problem.w for problem in contiguous])
    return dosa.PagedProblem(q, pool, w, lens, table), contiguous


LENS = [[40, 41], [0, -3], [7, 8], [100, 99]]


@pytest.mark.parametrize("method", ["auto", "dense", "fused", "dosa"])
def test_a_step_selects_what_contiguous_keys_do(method):
    step, contiguous = paged(1, LENS)
    got = dosa.topk_paged(*step, topk=12, method=method)
    want = [exact_selection(problem, 12, False, False) for problem in contiguous]
    np.testing.assert_array_equal(got.ids, np.concatenate([ids for ids, _ in want]))
    np.testing.assert_array_equal(got.scores, np.concatenate([scores for _, scores in want]))
    assert dosa.verify_paged(*step, ids=got.ids, scores=got.scores, rows=None) == (True, 8, [])
    got.ids[5, 3] = got.ids[5, 2]
    assert dosa.verify_paged(*step, ids=got.ids, rows=None).differences[0].startswith("row 5, slot 3")


def test_slots_name_places_in_the_pool():
    step, _ = paged(2, LENS, page_size=32)
    positions = dropin.fp8_paged_mqa_topk(*step, topk=20)
    slots = dropin.fp8_paged_mqa_topk(*step, topk=20, index_space="slot")
    table = step.block_table[np.repeat(np.arange(4), 2)]
    want = np.take_along_axis(table, np.maximum(positions, 0) // 32, 1) * 32 + positions % 32
    np.testing.assert_array_equal(slots, np.where(positions < 0, -1, want))


def test_any_queries_name_their_requests():
    step, contiguous = paged(3, [[90], [60], [75]])
    rows, lens = np.int32([2, 0, 0, 2, 1]), np.int32([75, 90, 12, 30, 0])
    q = np.concatenate(step.q)[rows]
    ks = np.int32([0, 50, 0, 8, 0])
    got = dosa.topk_paged(q, step.kv_cache, step.w[rows], lens, step.block_table, topk=9, requests=rows, ks=ks)
    for row, request in enumerate(rows):
        alone = contiguous[request]._replace(ke=lens[row : row + 1], ks=ks[row : row + 1])
        np.testing.assert_array_equal(got.ids[row], exact_selection(alone, 9, False, False)[0][0])


def test_recent_winners_are_kept_and_change_nothing():
    step, _ = paged(4, [[200], [300]])
    recent = np.full((2, 18), -1, np.int32)
    first = dosa.topk_paged(*step, topk=16, recent=recent)
    np.testing.assert_array_equal(np.sort(recent[:, :16]), np.sort(first.ids))
    assert (recent[:, 16:] == -1).all()
    again = dosa.topk_paged(*step, topk=16, recent=recent, method="dosa")
    np.testing.assert_array_equal(again.ids, first.ids)


def test_an_indexer_plans_once_for_steps_of_any_length():
    indexer = dosa.Indexer(threads=1)
    step, _ = paged(5, [[90], [60]])
    plan = indexer.plan_paged_for(step.q, step.kv_cache, step.block_table, topk=8)
    assert (plan.nq, plan.requests, plan.page_size, plan.nk) == (2, 2, 16, 112)
    ids, workspace = np.empty((2, 8), np.int32), dosa.empty_workspace(plan)
    for lens in ([[90], [60]], [[5], [0]]):
        now = step._replace(context_lens=np.int32(lens))
        indexer.run_paged(plan, *now, ids=ids, workspace=workspace)
        assert dosa.verify_paged(*now, ids=ids, rows=None).equal


def test_keys_are_quantised_inserted_gathered_and_moved():
    rng = np.random.default_rng(6)
    keys = rng.normal(size=(40, 64)).astype(np.float32)
    pool = pages.empty_pool(4, 16, 64)
    slots = rng.permutation(64)[:40].astype(np.int32)
    slots[3] = -1
    pages.insert_keys(pool, keys, slots)
    k, scale = pages.gather_keys(pool, np.int32([0, 1, 2, 3]), 0, 64)
    want, want_scale = dosa.prepare.quantize(keys, power_of_two=False)
    kept = np.arange(40) != 3
    np.testing.assert_array_equal(k[slots[kept]], want[kept])
    np.testing.assert_array_equal(scale[slots[kept]], want_scale[kept])
    assert np.count_nonzero(scale) == 39
    other = pages.empty_pool(3, 32, 64)
    pages.move_keys(pool, slots[kept], other, np.arange(39, dtype=np.int32) + 32)
    moved, moved_scale = pages.gather_keys(other, np.int32([2, 1]), 32, 7)
    np.testing.assert_array_equal(moved, want[kept][:7])
    np.testing.assert_array_equal(moved_scale, want_scale[kept][:7])


def test_bfloat16_keys_come_from_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    keys = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    pool = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
    pages.insert_keys(pool, keys, torch.arange(5, dtype=torch.int32), power_of_two=True)
    k, scale = pages.gather_keys(pool, np.int32([0]), 0, 5)
    want, want_scale = dosa.prepare.quantize(keys.float().numpy())
    np.testing.assert_array_equal(k, want)
    np.testing.assert_array_equal(scale, want_scale)


STEP = paged(7, [[30, 31]])[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": STEP.q[0, 0]}, r"q is a ndarray of 2 dimensions; it must be an array \[B, next_n, heads, dim\] or"),
        ({"kv_cache": STEP.kv_cache[:, :, 0]}, r"kv_cache is a ndarray of 3 dimensions"),
        ({"block_table": STEP.block_table[0]}, "block_table is a ndarray of 1 dimensions"),
        ({"context_lens": np.int32([30])}, "context_lens has 1 dimensions"),
        ({"block_table": STEP.block_table + 99}, r"block_table\[0, 0\] is"),
        ({"w": STEP.w[:1]}, r"w has shape \[1, 4\]; it must be \[2, 4\]"),
        ({"recent": np.zeros((2, 9), np.int32)}, r"recent has shape \[2, 9\]; it must be \[1, 9\]"),
    ],
)
def test_bad_steps_are_refused_in_one_line(change, message):
    with pytest.raises(dosa.ArgumentError, match=message):
        dosa.topk_paged(**{**STEP._asdict(), "topk": 4, **change})


def test_slots_outside_the_pool_are_refused_before_anything_is_written():
    pool = pages.empty_pool(1, 16, 32)
    with pytest.raises(dosa.ArgumentError, match="16"):
        pages.insert_keys(pool, np.ones((2, 32), np.float32), np.int32([3, 16]))
    assert not pool.any()


def test_decode_traces_are_mapped_step_by_step(tmp_path):
    from safetensors.numpy import save_file

    steps = [paged(seed, [[50], [20 + seed]], dim=128)[0] for seed in (8, 8)]
    steps[1] = steps[1]._replace(context_lens=np.int32([[51], [0]]))
    path = tmp_path / "steps.safetensors"
    tensors = {
        "kv_cache": steps[0].kv_cache.copy(),
        "block_table": steps[0].block_table,
        "context_lens": np.stack([step.context_lens for step in steps]),
        "q": np.stack([step.q for step in steps]),
        "w": np.stack([step.w.reshape(2, 1, 4) for step in steps]),
    }
    save_file(tensors, path, metadata={"domain": "code"})
    got, metadata = dosa.load_decode_trace(path)
    assert len(got) == 2 and metadata == {"domain": "code"}
    for mapped, step in zip(got, steps):
        np.testing.assert_array_equal(dosa.topk_paged(*mapped, topk=5).ids, dosa.topk_paged(*step, topk=5).ids)
    with pytest.raises(dosa.FileError, match="load_decode_trace maps"):
        dosa.load_trace(path)
    dosa.save_trace(tmp_path / "t.safetensors", *small_problem(1, 1, 10, 2))
    with pytest.raises(dosa.FileError, match="load_trace maps"):
        dosa.load_decode_trace(tmp_path / "t.safetensors")


def test_torch_operator_over_pages_compiles():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import dosa.torch_op  # noqa: F401

    tensors = [torch.from_numpy(array.copy()) for array in paged(9, LENS)[0]]
    recent = torch.full((4, 12), -1, dtype=torch.int32)
    torch.library.opcheck(torch.ops.dosa.topk_paged.default, (*tensors, recent, 10), {"index_space": "slot"})
    compiled = torch.compile(lambda *a: torch.ops.dosa.topk_paged(*a, 10)[0] + 1, backend="aot_eager", fullgraph=True)
    got = compiled(*tensors, recent)
    np.testing.assert_array_equal(got, dosa.topk_paged(*tensors, topk=10).ids + 1)
    assert (recent[0] >= 0).any()
