"""Arrays on a Hopper GPU: PyTorch, CuPy and JAX, streams, graphs, compiled operators. Sums of the scores are exact, so that
the CPU's selection has the same ids and score bits."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest
from conftest import small_problem

import dosa
from dosa import dropin, pages

NK, NQ, TOPK = 40_000, 64, 256


@pytest.fixture(scope="module", autouse=True)
def gpu():
    (reason,) = [backend["reason"] for backend in dosa.info()["backends"] if backend["name"] == "cuda"]
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def torch(gpu):
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def problem(seed: int) -> dosa.Problem:
    rng = np.random.default_rng(seed)
    made = small_problem(seed, NQ, NK, 32, 128)
    return made._replace(ks=rng.integers(0, 100, NQ).astype(np.int32), ke=rng.integers(NK // 2, NK, NQ).astype(np.int32))


PROBLEM = problem(0)


@pytest.fixture(scope="module")
def want(gpu):
    return dosa.topk(*PROBLEM, topk=TOPK)


def on_torch(torch, arrays):
    return [torch.from_numpy(array.copy()).cuda() for array in arrays]


def equal(got, want):
    np.testing.assert_array_equal(got.ids.get() if hasattr(got.ids, "get") else np.asarray(got.ids.cpu()), want.ids)
    scores = got.scores.get() if hasattr(got.scores, "get") else np.asarray(got.scores.cpu())
    assert scores.tobytes() == want.scores.tobytes()


@pytest.mark.parametrize("method", ["auto", "dense", "fused", "dosa"])
def test_torch_in_and_out_without_a_copy(torch, want, method):
    arrays = on_torch(torch, PROBLEM)
    arrays[:2] = [array.view(torch.float8_e4m3fn) for array in arrays[:2]]
    plan = dosa.Indexer(backend="cuda", method=method).plan_for(*arrays[:2], TOPK)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = dosa.topk(*arrays, topk=TOPK, method=method)
    taken = torch.cuda.max_memory_allocated() - before
    made = plan.workspace_bytes + 8 * NQ * TOPK
    assert made <= taken <= made + 3 * (2 << 20)  # what the allocator rounds up
    assert got.ids.is_cuda and got.ids.dtype == torch.int32 and got.scores.dtype == torch.float32
    equal(got, want)


def test_real_activations_have_the_emulators_ids_and_bits(torch, demo):
    arrays = on_torch(torch, [array for array in demo if array is not None])
    q, k, k_scale, w, ke = arrays[:4] + arrays[-1:]
    got = {method: dosa.topk(q, k, k_scale, w, ke=ke, topk=2048, method=method) for method in ("dense", "dosa")}
    equal(got["dosa"], dosa.Selection(got["dense"].ids.cpu().numpy(), got["dense"].scores.cpu().numpy(), None))
    found = dosa.verify(q, k, k_scale, w, ke=ke, ids=got["dosa"].ids, scores=got["dosa"].scores, rows=[100])
    assert found == (True, 1, [])
    got["dosa"].ids[100, 7] = 5
    assert not dosa.verify(q, k, k_scale, w, ke=ke, ids=got["dosa"].ids, rows=[100]).equal


def late(torch, arrays):
    """Arrays that the current stream writes, a fifth of a second from now."""
    made = [torch.zeros_like(array) for array in arrays]
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    for array, source in zip(made, arrays):
        array.copy_(source)
    return made


def test_the_current_stream_is_the_default(torch, want):
    arrays, stream = on_torch(torch, PROBLEM), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = dosa.topk(*late(torch, arrays), topk=TOPK)
        assert not stream.query()  # nothing waited
        stream.synchronize()
    equal(got, want)


def test_another_stream_sees_what_the_current_one_wrote(torch, want):
    arrays, stream = on_torch(torch, PROBLEM), torch.cuda.Stream()
    indexer = dosa.Indexer(backend="cuda", method="dosa")
    plan = indexer.plan_for(*arrays[:2], TOPK)
    workspace = dosa.empty_workspace(plan, arrays[0])
    out = torch.full((NQ, TOPK), -7, dtype=torch.int32).cuda(), torch.zeros(NQ, TOPK).cuda()
    got = dosa.topk(*late(torch, arrays), topk=TOPK, out=out, workspace=workspace, stream=stream.cuda_stream)
    stream.synchronize()
    equal(got, want)
    with pytest.raises(dosa.ArgumentError, match="stream is given without workspace"):
        dosa.topk(*arrays, stream=stream.cuda_stream)


def test_two_streams_with_two_workspaces_do_not_meet(torch, want):
    problems = [PROBLEM, problem(1)]
    wants = [want, dosa.topk(*problems[1], topk=TOPK)]
    arrays = [on_torch(torch, one) for one in problems]
    indexer = dosa.Indexer(backend="cuda", method="dosa")
    plan = indexer.plan_for(*arrays[0][:2], TOPK)
    workspaces = [dosa.empty_workspace(plan, arrays[0][0]) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                out = torch.empty((NQ, TOPK), dtype=torch.int32, device="cuda"), torch.empty((NQ, TOPK), device="cuda")
                indexer.run(plan, *arrays[i], ids=out[0], scores=out[1], workspace=workspaces[i])
                results[i].append(dosa.Selection(*out, None))
    torch.cuda.synchronize()
    for i in range(2):
        for got in results[i]:
            equal(got, wants[i])


@pytest.mark.parametrize("method", ["dense", "dosa"])
def test_a_graph_is_replayed_with_other_lengths(torch, method):
    arrays = on_torch(torch, PROBLEM)
    dosa.topk(*arrays, topk=TOPK, method=method)  # before capture, as PyTorch asks
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = dosa.topk(*arrays, topk=TOPK, method=method)
    for seed in (3, 4):
        rng = np.random.default_rng(seed)
        ke = rng.integers(-2, NK + 2, NQ).astype(np.int32)
        arrays[5].copy_(torch.from_numpy(ke))
        got.ids.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        equal(got, dosa.topk(*PROBLEM._replace(ke=ke), topk=TOPK))


def decoding(seed: int, batch: int, room: int):
    """A step of 2 draft tokens a request, 32 heads; scores have one value."""
    rng = np.random.default_rng(seed)
    blocks = room // 64
    pool = pages.empty_pool(batch * blocks)
    flat = pool.reshape(len(pool), -1)
    made = small_problem(seed, batch * 2, len(pool) * 64, 32, 128)
    flat[:, : 64 * 128] = made.k.reshape(len(pool), -1)
    flat[:, 64 * 128 :] = made.k_scale.view(np.uint8).reshape(len(pool), -1)
    table = rng.permutation(len(pool)).astype(np.int32).reshape(batch, blocks)
    lens = rng.integers(room // 2, room, (batch, 2)).astype(np.int32)
    return dosa.PagedProblem(made.q.reshape(batch, 2, 32, 128), pool, made.w, lens, table)


@pytest.mark.parametrize("method", ["auto", "dense", "dosa"])
def test_a_decoding_step_in_a_graph_follows_lengths_and_recent_winners(torch, method):
    step = decoding(5, 3, 8192)
    arrays = on_torch(torch, step)
    recent = torch.full((3, 9 * TOPK // 8), -1, dtype=torch.int32, device="cuda")
    equal(dosa.topk_paged(*arrays, topk=TOPK, method=method), dosa.topk_paged(*step, topk=TOPK))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = dosa.topk_paged(*arrays, topk=TOPK, method=method, recent=recent)
    for lens in ([[8192, 8191], [4000, 4001], [0, 1]], [[100, 300], [8000, 8000], [5000, 4000]]):
        now = step._replace(context_lens=np.int32(lens))
        arrays[3].copy_(torch.from_numpy(now.context_lens))
        for _ in range(2):  # with and without winners of these lengths
            graph.replay()
            torch.cuda.synchronize()
            equal(got, dosa.topk_paged(*now, topk=TOPK))
        assert set(recent[1, :TOPK].tolist()) == set(got.ids[3].tolist())


def test_prefill_over_pages_equals_contiguous_keys(torch):
    step = decoding(6, 2, 40_960)
    rng = np.random.default_rng(6)
    rows = np.sort(rng.integers(0, 2, 40)).astype(np.int32)
    q, w = step.q.reshape(4, 32, 128)[rng.integers(0, 4, 40)], step.w[rng.integers(0, 4, 40)]
    lens = rng.integers(0, 40_960, 40).astype(np.int32)
    given = (q, step.kv_cache, w, lens, step.block_table)
    got = dosa.topk_paged(*on_torch(torch, given), topk=TOPK, requests=torch.from_numpy(rows).cuda(), method="dosa")
    want = dosa.topk_paged(*given, topk=TOPK, requests=rows)
    equal(got, want)
    assert dosa.verify_paged(*given, requests=rows, ids=got.ids, rows=2).equal


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs", "inductor"])
def test_operators_compile(torch, want, backend):
    import dosa.torch_op  # noqa: F401

    arrays = on_torch(torch, PROBLEM)
    compiled = torch.compile(lambda *a: torch.ops.dosa.topk(*a, TOPK)[0] + 1, backend=backend, fullgraph=True)
    for _ in range(4):
        got = compiled(*arrays).clone()
    np.testing.assert_array_equal(got.cpu(), want.ids + 1)


def test_operators_keep_what_they_declare(torch):
    import dosa.torch_op  # noqa: F401

    torch.library.opcheck(torch.ops.dosa.topk.default, (*on_torch(torch, PROBLEM), TOPK))
    recent = torch.full((3, 64), -1, dtype=torch.int32, device="cuda")
    torch.library.opcheck(torch.ops.dosa.topk_paged.default, (*on_torch(torch, decoding(7, 3, 1024)), recent, 32))


def test_drop_ins_stay_on_the_gpu(torch):
    arrays = on_torch(torch, PROBLEM)
    q, k, scale, w, ks, ke = arrays
    table, rows = np.arange(2 * NK, dtype=np.int32)[::-1].copy().reshape(2, NK), np.int32([0, 20, NQ])
    offsets = np.arange(NQ, dtype=np.int32)
    host = (PROBLEM.q, (PROBLEM.k, PROBLEM.k_scale), PROBLEM.w, PROBLEM.ks, PROBLEM.ke)
    device = (q, (k, scale), w, ks, ke)
    for call, more in [
        (dropin.fp8_mqa_topk, ()),
        (dropin.topk_transform_ragged, (offsets,)),
        (dropin.topk_transform_paged, (table, rows)),
    ]:
        got = call(*device, *on_torch(torch, more), topk=TOPK)
        assert got.is_cuda and got.dtype == torch.int32
        np.testing.assert_array_equal(got.cpu(), call(*host, *more, topk=TOPK))
    buffer = torch.full((NQ + 3, TOPK + 5), -9, dtype=torch.int32, device="cuda")
    dropin.top_k_per_row_prefill(*device, buffer, topk=TOPK)
    want = np.full(buffer.shape, -9, np.int32)
    dropin.top_k_per_row_prefill(*host, want, topk=TOPK)
    np.testing.assert_array_equal(buffer.cpu(), want)


def test_the_gate_and_the_way_back(torch, want, caplog):
    caplog.set_level(logging.INFO, "dosa")
    arrays = on_torch(torch, PROBLEM)
    assert "64 queries, fewer than" in dropin.eligible(*arrays, topk=TOPK).reason
    assert dropin.eligible(*arrays, topk=TOPK, method="dosa")
    ids, scores = torch.full((NQ, TOPK), -7, dtype=torch.int32, device="cuda"), torch.zeros(NQ, TOPK, device="cuda")
    assert dropin.try_run(*arrays, topk=TOPK, ids=ids, scores=scores, method="dosa")
    equal(dosa.Selection(ids, scores, None), want)
    ids.fill_(-7)
    for change in ({"q": arrays[0].cpu()}, {"method": "dosa", "w": arrays[3].t().contiguous().t()}, {"memory_budget": 1}):
        assert not dropin.try_run(**{**dict(zip(PROBLEM._fields, arrays)), "topk": TOPK, "ids": ids, **change})
    assert caplog.text.count("dense path") == 3 and (ids == -7).all()


def test_counters_and_times_of_stages(torch):
    arrays = on_torch(torch, PROBLEM)
    indexer = dosa.Indexer(backend="cuda", method="dosa", time_stages=True)
    plan = indexer.plan_for(*arrays[:2], TOPK)
    workspace = dosa.empty_workspace(plan, arrays[0])
    ids = torch.empty((NQ, TOPK), dtype=torch.int32, device="cuda")
    stats = indexer.run(plan, *arrays, ids=ids, workspace=workspace)
    assert 0 < stats.seconds_select < 1 and stats.rows == NQ
    counted = indexer.counters(plan, workspace)
    assert counted.visible == (PROBLEM.ke - PROBLEM.ks).sum()
    assert counted.path.dosa + counted.path.full_loose + counted.path.full_exempt == NQ


def test_what_is_not_for_a_gpu_is_refused(torch):
    arrays = on_torch(torch, PROBLEM)
    with pytest.raises(dosa.UnsupportedError, match="explain looks into runs of the cpu backend"):
        dosa.explain(*arrays)
    with pytest.raises(dosa.ArgumentError, match="verify_rows needs the cpu backend"):
        dosa.topk(*arrays, topk=TOPK, verify_rows=1)
    with pytest.raises(dosa.ArgumentError, match="k is in host memory"):
        dosa.topk(arrays[0], arrays[1].cpu(), *arrays[2:], topk=TOPK)


def test_cupy_on_its_streams(want):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    arrays = [cupy.asarray(array) for array in PROBLEM]
    got = dosa.topk(*arrays, topk=TOPK)
    assert isinstance(got.ids, cupy.ndarray)
    equal(got, want)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        equal(dosa.topk(*(array.copy() for array in arrays), topk=TOPK, method="dosa"), want)


def test_cupy_captures_a_graph(want):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    arrays = [cupy.asarray(array) for array in PROBLEM]
    indexer = dosa.Indexer(backend="cuda", method="dosa")
    plan = indexer.plan_for(*arrays[:2], TOPK)
    workspace = dosa.empty_workspace(plan, arrays[0])
    ids, scores = cupy.empty((NQ, TOPK), cupy.int32), cupy.empty((NQ, TOPK), cupy.float32)
    indexer.run(plan, *arrays, ids=ids, scores=scores, workspace=workspace)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        indexer.run(plan, *arrays, ids=ids, scores=scores, workspace=workspace)
        graph = stream.end_capture()
        ids.fill(-7)
        graph.launch()
        stream.synchronize()
    equal(dosa.Selection(ids, scores, None), want)


def test_jax_waits_for_what_it_cannot_order(want):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    arrays = [jax.numpy.asarray(array) for array in PROBLEM]
    made = [array + array.dtype.type(0) for array in arrays]  # still being computed when dosa is called
    for method in ("dense", "dosa"):
        got = dosa.topk(*made, topk=TOPK, method=method)
        assert isinstance(got.ids, jax.Array) and got.ids.device == arrays[0].device
        np.testing.assert_array_equal(jax.jit(lambda ids: ids + 1)(got.ids), want.ids + 1)
        assert np.asarray(got.scores).tobytes() == want.scores.tobytes()
        assert got.stats.visible == (PROBLEM.ke - PROBLEM.ks).sum()  # it is done, so they are complete
    with pytest.raises(dosa.ArgumentError, match="JAX arrays, which cannot be written"):
        dosa.topk(*arrays, topk=TOPK, out=(got.ids, got.scores))
