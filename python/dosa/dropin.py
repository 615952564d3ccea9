"""The calls that serving engines make today, answered by dosa: same tensors in, same ids out.

Each takes the arrays of one framework (host or GPU memory) and fills or returns int32 ids: exactly min(visible, topk)
valid ones a row, then -1. `eligible` says beforehand whether dosa would take a call and why not; `try_run` falls back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ._arrays import Array, namespace
from ._errors import ArgumentError, Error
from ._indexer import Indexer, problem_of, topk as select, topk_paged as select_paged, with_backend

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Options

_log = logging.getLogger("dosa")


def fp8_mqa_topk(
    q: Array,
    kv: tuple[Array, Array],
    weights: Array,
    cu_seq_len_k_start: Array,
    cu_seq_len_k_end: Array,
    topk: int = 2048,
    *,
    stream: int | None = None,
    **options: Unpack[Options],
) -> Array:
    """The arguments of DeepGEMM's ``fp8_mqa_logits``, answered by the Top-K of its logits, which are never stored.

    Parameters
    ----------
    q : array, float8_e4m3fn or uint8 [queries, heads, dim]
    kv : (array, array)
        float8_e4m3fn or uint8 [keys, dim] and float32 [keys]: keys and their scales.
    weights : array, float32 [queries, heads]
        Signed, the query's scale folded in.
    cu_seq_len_k_start, cu_seq_len_k_end : array, int32 [queries]
        Query j sees the keys [start, end).
    topk : int
        Keys to keep per query.
    stream, **options
        As `dosa.topk`.

    Returns
    -------
    array, int32 [queries, topk]
        Columns of the logits, best first.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `dosa.topk`.

    References
    ----------
    DeepGEMM, csrc/apis/attention.hpp. There the ids would come from ``logits.topk(topk)`` and a mask.
    """
    k, k_scale = kv
    ks, ke = cu_seq_len_k_start, cu_seq_len_k_end
    return select(q, k, k_scale, weights, ks, ke, topk, scores=False, stream=stream, **options).ids


def fp8_paged_mqa_topk(
    q: Array,
    kv_cache: Array,
    weights: Array,
    context_lens: Array,
    block_table: Array,
    topk: int = 2048,
    *,
    recent: Array | None = None,
    stream: int | None = None,
    **options: Unpack[Options],
) -> Array:
    """The arguments of DeepGEMM's ``fp8_paged_mqa_logits``, answered by the Top-K of its logits; no schedule is needed.

    Parameters
    ----------
    q : array, float8_e4m3fn or uint8 [B, next_n, heads, dim]
    kv_cache : array, uint8 [pages, page_size, 1, dim + 4]
    weights : array, float32 [B * next_n, heads]
    context_lens : array, int32 [B, next_n]
        Read when the work runs, so that a captured graph may be replayed with other lengths.
    block_table : array, int32 [B, max_blocks]
    topk : int
        Keys to keep per query.
    recent, stream, **options
        As `dosa.topk_paged`. index_space "slot" gives page * page_size + offset, as SGLang's ``topk_transform_512_v2`` and
        FlashInfer-Bench's indexer do.

    Returns
    -------
    array, int32 [B * next_n, topk]
        Positions in the request, best first.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `dosa.topk_paged`.

    References
    ----------
    DeepGEMM, csrc/apis/attention.hpp.
    """
    cached = (q, kv_cache, weights, context_lens, block_table)
    return select_paged(*cached, topk, scores=False, recent=recent, stream=stream, **options).ids


def top_k_per_row_prefill(
    q: Array,
    kv: tuple[Array, Array],
    weights: Array,
    ks: Array,
    ke: Array,
    topk_indices: Array,
    topk: int = 2048,
    *,
    stream: int | None = None,
    **options: Unpack[Options],
) -> None:
    """vLLM's ``fp8_mqa_logits`` and ``top_k_per_row_prefill`` in one: fills its index buffer.

    Parameters
    ----------
    q, kv, weights, ks, ke, topk, stream, **options
        As `fp8_mqa_topk`.
    topk_indices : array, int32 [>= queries, >= topk]
        The shared buffer. Its first `queries` rows and `topk` columns are written, all of them; nothing else is.
        Ids are relative to ks, ascending; the padding is -1.

    Raises
    ------
    ArgumentError
        The buffer is too small, and what `dosa.topk` refuses. Nothing has been written then.

    References
    ----------
    vLLM, csrc/sampler.cu and vllm/model_executor/layers/sparse_attn_indexer.py. A NaN score ranks last here, but does
    fill a row that would be short without it.
    """
    nq = int(q.shape[0])
    if len(topk_indices.shape) != 2 or topk_indices.shape[0] < nq or topk_indices.shape[1] < topk:
        raise ArgumentError(f"topk_indices has shape {list(topk_indices.shape)}; it must be at least [{nq}, {topk}]")
    k, k_scale = kv
    arranged: Options = {"order": "ascending", "index_space": "relative", **options}
    select(q, k, k_scale, weights, ks, ke, topk, out=(topk_indices[:nq, :topk], None), stream=stream, **arranged)


def topk_transform_ragged(
    q: Array,
    kv: tuple[Array, Array],
    weights: Array,
    ks: Array,
    ke: Array,
    topk_indices_offset: Array,
    topk: int = 2048,
    *,
    stream: int | None = None,
    **options: Unpack[Options],
) -> Array:
    """SGLang's ragged prefill: logits, Top-K and transform in one.

    Parameters
    ----------
    q, kv, weights, ks, ke, topk, stream, **options
        As `fp8_mqa_topk`.
    topk_indices_offset : array, int32 [queries]
        Added to the ids of each row, which count from ks. One per row, not per request.

    Returns
    -------
    array, int32 [queries, topk]
        Best first; the padding stays -1.

    Raises
    ------
    ArgumentError
        The offsets' shape, and what `dosa.topk` refuses.

    References
    ----------
    SGLang, ``fast_topk_transform_ragged_fused``.
    """
    nq = int(q.shape[0])
    if tuple(topk_indices_offset.shape) != (nq,):
        raise ArgumentError(f"topk_indices_offset has shape {list(topk_indices_offset.shape)}; it must be [{nq}]")
    k, k_scale = kv
    arranged: Options = {"index_space": "relative", **options}
    ids = select(q, k, k_scale, weights, ks, ke, topk, scores=False, stream=stream, **arranged).ids
    return ids + (ids >= 0) * topk_indices_offset[:, None]


def topk_transform_paged(
    q: Array,
    kv: tuple[Array, Array],
    weights: Array,
    ks: Array,
    ke: Array,
    page_table: Array,
    cu_seqlens_q: Array,
    topk: int = 2048,
    *,
    stream: int | None = None,
    **options: Unpack[Options],
) -> Array:
    """SGLang's paged prefill: logits, Top-K and page table in one.

    Parameters
    ----------
    q, kv, weights, ks, ke, topk, stream, **options
        As `fp8_mqa_topk`; the keys of every request were gathered, its first one is at ks.
    page_table : array, int32 [requests, >= longest]
        Slot of each position of a request: the table of page size 1.
    cu_seqlens_q : array, int32 [requests + 1]
        Queries cu_seqlens_q[r] to cu_seqlens_q[r + 1] are request r's.

    Returns
    -------
    array, int32 [queries, topk]
        Slots, best first; the padding stays -1.

    Raises
    ------
    ArgumentError
        The tables' shapes, and what `dosa.topk` refuses.

    References
    ----------
    SGLang, ``fast_topk_transform_fused``.
    """
    shapes = list(page_table.shape), list(cu_seqlens_q.shape)
    if len(shapes[0]) != 2 or shapes[1] != [shapes[0][0] + 1]:
        raise ArgumentError(
            f"page_table and cu_seqlens_q have shapes {shapes[0]} and {shapes[1]}; "
            "they must be [requests, positions] and [requests + 1]"
        )
    k, k_scale = kv
    arranged: Options = {"index_space": "relative", **options}
    ids = select(q, k, k_scale, weights, ks, ke, topk, scores=False, stream=stream, **arranged).ids
    space = namespace(ids)
    rows = space.cumsum(space.ones_like(ids[:, 0]), 0) - 1
    requests = (rows[:, None] >= cu_seqlens_q[1:-1]).sum(-1)
    return space.where(ids < 0, ids, page_table[requests[:, None], ids])


class Eligibility(NamedTuple):
    """Whether dosa takes a call: true in a condition exactly if `ok`."""

    ok: bool
    reason: str
    """Why not; empty if it does."""

    def __bool__(self) -> bool:
        return self.ok


def eligible(
    q: Array,
    k: Array,
    k_scale: Array,
    w: Array,
    ks: Array | None = None,
    ke: Array | None = None,
    topk: int = 2048,
    *,
    ids: Array | None = None,
    hints: Array | None = None,
    **options: Unpack[Options],
) -> Eligibility:
    """Whether `dosa.topk` would take these arguments and screening can pay at this length; computes nothing.

    Parameters
    ----------
    q, k, k_scale, w, ks, ke, topk, hints, **options
        As `dosa.topk` takes them; values are not read.
    ids : array, optional
        The output, if it is to be checked too.

    Returns
    -------
    Eligibility
        False with a reason where dosa would raise, and where there are fewer than `min_context` keys (default: derived
        from topk) unless a method is named.

    Notes
    -----
    Cost: microseconds. Never raises a dosa.Error, never waits for a GPU.
    """
    try:
        indexer = Indexer(**with_backend(options, q))
        plan = indexer.plan_for(q, k, topk)
        indexer._core.check(plan, problem_of(q, k, k_scale, w, ks, ke, hints), ids)
    except Error as error:
        return Eligibility(False, str(error))
    chosen = options.get("method", "auto") == "auto"
    if chosen and plan.method == "dense":
        return Eligibility(False, plan.reason)
    if chosen and plan.nk < plan.min_context:
        return Eligibility(False, f"there are {plan.nk} keys; screening pays from {plan.min_context} on (min_context)")
    return Eligibility(True, "")


def try_run(
    q: Array,
    k: Array,
    k_scale: Array,
    w: Array,
    ks: Array | None = None,
    ke: Array | None = None,
    topk: int = 2048,
    *,
    ids: Array,
    scores: Array | None = None,
    hints: Array | None = None,
    workspace: Array | None = None,
    stream: int | None = None,
    **options: Unpack[Options],
) -> bool:
    """Select into the caller's arrays, or return False so that the dense path runs.

    Parameters
    ----------
    q, k, k_scale, w, ks, ke, topk, hints, workspace, stream, **options
        As `dosa.topk`.
    ids, scores : array
        int32 and, if wanted, float32 [queries, topk].

    Returns
    -------
    bool
        True: the arrays hold the exact selection. False: not eligible, or refused; the reason is logged to "dosa" at level
        INFO (a difference found by `verify_rows` at ERROR), and the arrays must be filled by someone else.
    """
    gate = eligible(q, k, k_scale, w, ks, ke, topk, ids=ids, hints=hints, **options)
    if not gate:
        _log.info("dense path: %s", gate.reason)
        return False
    out = (ids, scores)
    try:
        select(q, k, k_scale, w, ks, ke, topk, out=out, hints=hints, workspace=workspace, stream=stream, **options)
    except ArgumentError as error:  # of the scores or the workspace, which the gate does not see
        _log.info("dense path: %s", error)
        return False
    except Error as error:
        _log.error("dense path: %s", error)
        return False
    return True
