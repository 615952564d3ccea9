"""Selection: topk and the Indexer below it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from . import _core
from ._arrays import Array, current_stream, empty, exported, framework, host_empty, on_gpu, waits
from ._errors import ArgumentError
from ._options import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Selection(NamedTuple):
    """What was selected.

    Attributes
    ----------
    ids : array, int32 [queries, topk]
        Exactly min(visible, topk) valid key ids a row, then -1.
    scores : array, float32 [queries, topk], or None
        Reference scores of the ids, bit for bit; -inf where the id is -1; a NaN score is 0x7FC00000.
    stats : Stats
        What it took. On a GPU only what the host knows without waiting; `Indexer.counters` has the rest.
    """

    ids: Array
    scores: Array | None
    stats: _core.Stats


def problem_of(
    q, k, k_scale, w, ks=None, ke=None, hints=None, *, kv_cache=None, block_table=None, requests=None, stream=None
) -> tuple:
    """The arrays of a problem as the compiled part takes them."""
    on = stream_of(q, stream)
    arrays = (q, k, k_scale, w, ks, ke, hints, kv_cache, block_table, requests)
    return tuple(None if array is None else exported(array, on) for array in arrays)


def paged_problem_of(q, kv_cache, w, context_lens, block_table, **more) -> tuple:
    """The same where keys lie in pages."""
    return problem_of(q, None, None, w, ke=context_lens, kv_cache=kv_cache, block_table=block_table, **more)


def stream_of(q: Array, stream: int | None) -> int:
    """The stream, or the current one of q's framework."""
    return current_stream(q) if stream is None else stream


def extents(q: Array, k: Array) -> tuple[int, int, int, int]:
    """(queries, keys, heads, dim) of a problem."""
    _demand("q", q, ("queries, heads, dim",))
    _demand("k", k, ("keys, dim",))
    return int(q.shape[0]), int(k.shape[0]), int(q.shape[1]), int(q.shape[2])


def paged_extents(q: Array, kv_cache: Array, block_table: Array) -> tuple[int, int, int, int, int, int]:
    """(queries, keys that a request has room for, heads, dim, requests, page size) of a problem with keys in pages."""
    _demand("q", q, ("B, next_n, heads, dim", "queries, heads, dim"))
    _demand("kv_cache", kv_cache, ("pages, page_size, 1, dim + 4",))
    _demand("block_table", block_table, ("requests, max_blocks",))
    *rows, heads, dim = (int(size) for size in q.shape)
    requests, blocks = (int(size) for size in block_table.shape)
    page_size = int(kv_cache.shape[1])
    return math.prod(rows), blocks * page_size, heads, dim, requests, page_size


def _demand(name: str, array: Array, allowed: tuple[str, ...]) -> None:
    rank = len(getattr(array, "shape", ()))
    if rank not in [axes.count(",") + 1 for axes in allowed]:
        words = " or ".join(f"[{axes}]" for axes in allowed)
        raise ArgumentError(f"{name} is a {type(array).__name__} of {rank} dimensions; it must be an array {words}")


def with_backend(options: Options, q: Array) -> Options:
    """The options, with the backend that reads q where none is named."""
    return {"backend": "cuda" if on_gpu(q) else "cpu", **options}


class Indexer:
    """Exact Top-K key ids of every query: plan once, run often.

    A plan fixes every size of a run, workspace included. `run` allocates nothing, releases the GIL and, on a GPU,
    enqueues its work without waiting for it.

    Parameters
    ----------
    **options : Options
        How it is computed; none changes which keys are selected. `backend` is "cpu" unless given.

    Raises
    ------
    ArgumentError
        An option's value.
    UnsupportedError
        The backend or the CPU implementation is not available here.

    Notes
    -----
    An Indexer serves one thread at a time: a second one waits. Plans may be shared.

    Examples
    --------
    >>> problem, _ = dosa.load_trace("traces/demo-h32.safetensors")
    >>> indexer = dosa.Indexer(threads=2)
    >>> plan = indexer.plan_for(problem.q, problem.k, topk=256)
    >>> ids = np.empty((plan.nq, 256), np.int32)
    >>> workspace = dosa.empty_workspace(plan)
    >>> stats = indexer.run(plan, *problem, ids=ids, workspace=workspace)
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        for name in options.keys() - Options.__annotations__.keys():
            raise ArgumentError(f"there is no option {name!r}; there are {', '.join(Options.__annotations__)}")
        self._core = _core.Indexer(dict(options))

    def plan(
        self,
        nq: int,
        nk: int,
        heads: int,
        dim: int = 128,
        topk: int = 2048,
        *,
        requests: int = 1,
        page_size: int = 0,
    ) -> _core.Plan:
        """Fix every size of a run.

        Parameters
        ----------
        nq, nk : int
            Queries and keys; 0 is legal. Of keys in pages, those that one request has room for.
        heads : int
            Indexer heads, 1 to 128.
        dim : int
            Components of a head: 32, 64 or 128.
        topk : int
            Keys to keep per query, 1 to 4096.
        requests, page_size : int
            Of keys in pages: rows of the block table, and 16, 32, 64, 128 or 256.

        Raises
        ------
        ArgumentError, UnsupportedError
            A size that the backend does not have, or a memory budget below the smallest workspace.

        Notes
        -----
        Cost: microseconds.
        """
        sizes = {"nq": nq, "nk": nk, "heads": heads, "dim": dim, "topk": topk, "requests": requests, "page_size": page_size}
        try:
            return self._core.plan(*sizes.values())
        except TypeError:  # of the binding: its message shows signatures, not what is wrong
            given = ", ".join(f"{name} is {size!r}" for name, size in sizes.items())
            raise ArgumentError(f"a size is no integer, or too large: {given}") from None

    def plan_for(self, q: Array, k: Array, topk: int = 2048) -> _core.Plan:
        """The plan for arrays of these shapes."""
        return self.plan(*extents(q, k), topk)

    def plan_paged_for(self, q: Array, kv_cache: Array, block_table: Array, topk: int = 2048) -> _core.Plan:
        """The plan for arrays of these shapes, see `topk_paged`. Lengths are read when it runs."""
        *sizes, requests, page_size = paged_extents(q, kv_cache, block_table)
        return self.plan(*sizes, topk, requests=requests, page_size=page_size)

    def run(
        self,
        plan: _core.Plan,
        q: Array,
        k: Array,
        k_scale: Array,
        w: Array,
        ks: Array | None = None,
        ke: Array | None = None,
        *,
        ids: Array,
        scores: Array | None = None,
        workspace: Array,
        hints: Array | None = None,
        stream: int | None = None,
    ) -> _core.Stats:
        """Select into the caller's arrays.

        Parameters
        ----------
        plan : Plan
            Of this Indexer, for these shapes.
        q, k, k_scale, w, ks, ke, hints : array
            As `topk` takes them. Only read, and only during the call (GPU: until the stream has passed it).
        ids : array, int32 [queries, topk]
            Written in place, every row; rows may be padded.
        scores : array, float32 [queries, topk], optional
            Written in place.
        workspace : array, uint8 [>= plan.workspace_bytes]
            64-byte aligned scratch memory of the backend's device, see `empty_workspace`; contents do not matter.
            One per run at a time.
        stream : int, optional
            CUDA stream as a number; default: the current one of q's framework. Ignored on the CPU.

        Returns
        -------
        Stats
            Complete on the CPU; on a GPU what the host knows, see `counters`.

        Raises
        ------
        ArgumentError
            An array does not match the plan, or the workspace is too small. Nothing has been written then.
        VerificationError
            `verify_rows` found a difference: a bug of dosa.
        """
        on = stream_of(q, stream)
        problem = problem_of(q, k, k_scale, w, ks, ke, hints, stream=on)
        return self._run(plan, problem, on, ids, scores, None, workspace)

    def run_paged(
        self,
        plan: _core.Plan,
        q: Array,
        kv_cache: Array,
        w: Array,
        context_lens: Array,
        block_table: Array,
        *,
        ids: Array,
        scores: Array | None = None,
        workspace: Array,
        recent: Array | None = None,
        ks: Array | None = None,
        requests: Array | None = None,
        hints: Array | None = None,
        stream: int | None = None,
    ) -> _core.Stats:
        """`run` with keys in pages.

        Parameters
        ----------
        plan : Plan
            See `plan_paged_for`.
        q, kv_cache, w, context_lens, block_table, recent, ks, requests, hints : array
            As `topk_paged` takes them; `recent` is read and written.
        ids, scores, workspace, stream
            As in `run`.

        Returns
        -------
        Stats
            As `run`.

        Raises
        ------
        ArgumentError, VerificationError
            As `run`.
        """
        on = stream_of(q, stream)
        more = {"ks": ks, "requests": requests, "hints": hints, "stream": on}
        problem = paged_problem_of(q, kv_cache, w, context_lens, block_table, **more)
        return self._run(plan, problem, on, ids, scores, recent, workspace)

    def _run(self, plan, problem, stream, ids, scores, recent, workspace) -> _core.Stats:
        arrays = (ids, scores, recent, workspace)
        return self._core.run(plan, problem, *(None if a is None else exported(a, stream) for a in arrays), stream)

    def counters(self, plan: _core.Plan, workspace: Array, stream: int | None = None) -> _core.Stats:
        """What the last run on this workspace counted; waits for the stream. Only needed on a GPU."""
        on = stream_of(workspace, stream)
        return self._core.counters(plan, exported(workspace, on), on)


def empty_workspace(plan: _core.Plan, like: Array | None = None) -> Array:
    """Scratch memory for a plan: uint8 [plan.workspace_bytes], aligned.

    Parameters
    ----------
    plan : Plan
    like : array, optional
        An array of the framework and device that the workspace shall belong to; default: NumPy's.
    """
    if like is None or not on_gpu(like):
        return host_empty((plan.workspace_bytes,), "uint8")
    return empty(like, (plan.workspace_bytes,), "uint8")[0]


def topk(
    q: Array,
    k: Array,
    k_scale: Array,
    w: Array,
    ks: Array | None = None,
    ke: Array | None = None,
    topk: int = 2048,
    *,
    scores: bool = True,
    out: tuple[Array, Array | None] | None = None,
    hints: Array | None = None,
    workspace: Array | None = None,
    stream: int | None = None,
    **options: Unpack[Options],
) -> Selection:
    """Select the `topk` best keys of every query, exactly.

    ``score[i] = k_scale[i] * sum_h w[h] * max(q[h] . k[i], 0)``; the keys that come first by (score descending, id
    ascending) are selected.

    Parameters
    ----------
    q : array, float8_e4m3fn or uint8 [queries, heads, dim]
        Indexer queries, raw FP8 components; heads 1 to 128, dim 32, 64 or 128. Any strides.
    k : array, float8_e4m3fn or uint8 [keys, dim]
        Indexer keys, shared by all heads.
    k_scale : array, float32 [keys]
        Scale of each key.
    w : array, float32 [queries, heads]
        Signed head weights with the query's scale, dim^-1/2 and heads^-1/2 folded in (see `dosa.prepare`).
    ks, ke : array, int32 [queries], optional
        Query j may select the keys max(ks[j], 0) <= i < min(ke[j], keys). Default: 0 and all.
    topk : int
        Keys to keep per query, 1 to 4096.
    scores : bool
        Whether scores are wanted beside the ids.
    out : (ids, scores or None), optional
        Arrays to write into: int32 and float32 [queries, topk]; rows may be padded.
    hints : array, int32 [queries, m] or [1, m], optional
        Likely winners, any values. They can only change the time.
    workspace : array, uint8, optional
        See `Indexer.run`; default: made for this call.
    stream : int, optional
        CUDA stream as a number; default: the current one of q's framework. With a stream of your own pass `workspace`
        too. Ignored on the CPU.
    **options : Options
        How it is computed; none changes which keys are selected.

    Returns
    -------
    Selection
        (ids, scores, stats), arrays of q's framework beside q. Inputs are never copied.

    Raises
    ------
    ArgumentError
        An array's dtype, shape or device, or an option; the message has the value and what is allowed.
    UnsupportedError
        The shape or device is not supported, or the smallest workspace exceeds `memory_budget`.

    Notes
    -----
    Non-finite data is never an error: a NaN score ranks below -inf. Ids and score bits do not depend on method, threads,
    chunking or run. The GIL is released. Cost: between 1/6 and 1 of full scoring, which takes queries * keys * heads *
    dim multiply-adds; memory: `Indexer.plan(...).workspace_bytes`.

    References
    ----------
    DeepSeek-V3.2 technical report, section 2.1 (the indexer); docs/certificate.md (why skipped keys cannot win).

    Examples
    --------
    >>> problem, _ = dosa.load_trace("traces/demo-h32.safetensors")
    >>> ids, scores, stats = dosa.topk(*problem, topk=256)
    >>> stats.refined < stats.visible // 10
    True
    """
    indexer = Indexer(**with_backend(options, q))
    call = _Call(indexer, indexer.plan_for(q, k, topk), q, out, scores, workspace, stream)
    stats = indexer.run(call.plan, q, k, k_scale, w, ks, ke, hints=hints, **call.arrays)
    return call.selection(stats)


class _Call:
    """The arrays of one call that its caller did not bring."""

    def __init__(self, indexer, plan, q, out, scores, workspace, stream) -> None:
        self.indexer, self.plan = indexer, plan
        if workspace is None:
            if stream is not None and on_gpu(q):
                raise ArgumentError("stream is given without workspace; memory of one stream may be reused by another")
            workspace = empty_workspace(plan, q)
        if out is None:
            shape = (plan.nq, plan.topk)
            to_ids, self.ids = empty(q, shape, "int32")
            to_scores, self.scores = empty(q, shape, "float32") if scores else (None, lambda: None)
        else:
            to_ids, to_scores = out
            if "jaxlib" in (framework(to_ids), framework(to_scores)):
                raise ArgumentError("out holds JAX arrays, which cannot be written")
            self.ids, self.scores = (lambda: to_ids), (lambda: to_scores)
        self.arrays = {"ids": to_ids, "scores": to_scores, "workspace": workspace, "stream": stream}
        self.waits = waits(q)

    def selection(self, stats: _core.Stats) -> Selection:
        if self.waits:
            stats = self.indexer.counters(self.plan, self.arrays["workspace"], self.arrays["stream"])
        return Selection(self.ids(), self.scores(), stats)


def topk_paged(
    q: Array,
    kv_cache: Array,
    w: Array,
    context_lens: Array,
    block_table: Array,
    topk: int = 2048,
    *,
    scores: bool = True,
    out: tuple[Array, Array | None] | None = None,
    recent: Array | None = None,
    ks: Array | None = None,
    requests: Array | None = None,
    hints: Array | None = None,
    workspace: Array | None = None,
    stream: int | None = None,
    **options: Unpack[Options],
) -> Selection:
    """Select the `topk` best keys of every query from keys in pages, exactly: a step of decoding, or prefill over a cache.

    Parameters
    ----------
    q : array, float8_e4m3fn or uint8 [B, next_n, heads, dim] or [queries, heads, dim]
        Draft token j of request b is row b * next_n + j, next_n 1 to 8; or any queries, see `requests`.
    kv_cache : array, uint8 [pages, page_size, 1, dim + 4]
        A page is planar: page_size * dim bytes of keys, then page_size float32 scales. page_size is 16, 32, 64, 128 or
        256; the stride between pages is free, a multiple of 4 bytes. See `dosa.pages`.
    w : array, float32 [queries, heads]
        As in `topk`.
    context_lens : array, int32 [B, next_n] or [queries]
        A query sees the positions below; 0 or less gives a row of -1.
    block_table : array, int32 [requests, max_blocks]
        Page i / page_size of a request holds its position i. Entries behind the visible keys may hold anything.
    topk, scores, out, workspace, stream, **options
        As in `topk`. index_space "slot" makes ids page * page_size + offset; "absolute" positions in the request.
    recent : array, int32 [requests, m], optional
        Recent winners, -1 at first, yours to keep from step to step: read as hints, then brought up to date. m = 9/8 topk
        serves well. They can only change the time.
    ks : array, int32 [queries], optional
        First visible position; default: 0.
    requests : array, int32 [queries], optional
        The row of block_table that a query reads; default: queries / requests each.
    hints : array, int32 [queries, m], [requests, m] or [1, m], optional
        Likely winners instead of `recent`, any values.

    Returns
    -------
    Selection

    Raises
    ------
    ArgumentError, UnsupportedError
        As `topk`; on the CPU also a page that a query sees and that does not exist (on a GPU it reads as zeros).

    Notes
    -----
    Nothing is copied, except that a GPU gathers the keys of more than 8 queries a request in the workspace. Cost: decoding
    reads every visible key once.

    References
    ----------
    DeepGEMM, ``fp8_paged_mqa_logits``: the order of these arguments is its.

    Examples
    --------
    >>> pool = dosa.pages.empty_pool(pages=2)
    >>> keys = np.random.default_rng(0).normal(size=(100, 128)).astype(np.float32)
    >>> dosa.pages.insert_keys(pool, keys, np.arange(100, dtype=np.int32))
    >>> q, w = dosa.prepare.encode_e4m3(keys[:1, None, None]), np.ones((1, 1), np.float32)
    >>> ids = dosa.topk_paged(q, pool, w, np.int32([[100]]), np.int32([[0, 1]]), topk=3).ids
    >>> int(ids[0, 0])
    0
    """
    indexer = Indexer(**with_backend(options, q))
    call = _Call(indexer, indexer.plan_paged_for(q, kv_cache, block_table, topk), q, out, scores, workspace, stream)
    more = {"recent": recent, "ks": ks, "requests": requests, "hints": hints}
    stats = indexer.run_paged(call.plan, q, kv_cache, w, context_lens, block_table, **more, **call.arrays)
    return call.selection(stats)
