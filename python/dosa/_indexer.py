"""Selection: topk and the Indexer below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from . import _core
from ._arrays import Array, current_stream, empty, host_empty, on_gpu, readable
from ._errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Options


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


def problem_of(q, k, k_scale, w, ks, ke, hints=None) -> tuple:
    """The arrays of a problem as the compiled part takes them."""
    return tuple(None if array is None else readable(array) for array in (q, k, k_scale, w, ks, ke, hints))


def extents(q: Array, k: Array) -> tuple[int, int, int, int]:
    """(queries, keys, heads, dim) of a problem."""
    for name, array, axes in (("q", q, "queries, heads, dim"), ("k", k, "keys, dim")):
        rank = len(getattr(array, "shape", ()))
        if rank != axes.count(",") + 1:
            raise ArgumentError(f"{name} is a {type(array).__name__} of {rank} dimensions; it must be an array [{axes}]")
    return int(q.shape[0]), int(k.shape[0]), int(q.shape[1]), int(q.shape[2])


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
        self._core = _core.Indexer(dict(options))

    def plan(self, nq: int, nk: int, heads: int, dim: int = 128, topk: int = 2048) -> _core.Plan:
        """Fix every size of a run.

        Parameters
        ----------
        nq, nk : int
            Queries and keys; 0 is legal.
        heads : int
            Indexer heads, 1 to 128.
        dim : int
            Components of a head: 32, 64 or 128.
        topk : int
            Keys to keep per query, 1 to 4096.

        Raises
        ------
        ArgumentError, UnsupportedError
            A size that the backend does not have, or a memory budget below the smallest workspace.

        Notes
        -----
        Cost: microseconds.
        """
        return self._core.plan(nq, nk, heads, dim, topk)

    def plan_for(self, q: Array, k: Array, topk: int = 2048) -> _core.Plan:
        """The plan for arrays of these shapes."""
        return self.plan(*extents(q, k), topk)

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
        return self._core.run(
            plan,
            problem_of(q, k, k_scale, w, ks, ke, hints),
            ids,
            scores,
            workspace,
            current_stream(q) if stream is None else stream,
        )

    def counters(self, plan: _core.Plan, workspace: Array, stream: int | None = None) -> _core.Stats:
        """What the last run on this workspace counted; waits for the stream. Only needed on a GPU."""
        return self._core.counters(plan, workspace, current_stream(workspace) if stream is None else stream)


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
    plan = indexer.plan_for(q, k, topk)
    if workspace is None:
        if stream is not None and on_gpu(q):
            raise ArgumentError("stream is given without workspace; memory of one stream may be reused by another")
        workspace = empty_workspace(plan, q)
    if out is None:
        shape = (plan.nq, topk)
        to_ids, ids = empty(q, shape, "int32")
        to_scores, score_array = empty(q, shape, "float32") if scores else (None, lambda: None)
    else:
        to_ids, to_scores = out
        ids, score_array = (lambda: to_ids), (lambda: to_scores)
    stats = indexer.run(
        plan,
        q,
        k,
        k_scale,
        w,
        ks,
        ke,
        ids=to_ids,
        scores=to_scores,
        workspace=workspace,
        hints=hints,
        stream=stream,
    )
    return Selection(ids(), score_array(), stats)
