"""Checking and explaining: the oracle, its scores, and why a run took what it took. All of it computes on the CPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Sequence

import numpy as np

from . import _core
from ._arrays import Array, host_empty, on_gpu, to_host
from ._errors import ArgumentError, UnsupportedError
from ._indexer import extents, paged_extents, paged_problem_of, problem_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import IndexSpace, Options, Reference


def spread_rows(nq: int, rows: int | Sequence[int] | None) -> list[int]:
    """That many rows evenly spread over nq and ending with the last one; None: all; a sequence: itself."""
    if rows is None:
        return list(range(nq))
    if not isinstance(rows, int):
        return [int(row) for row in rows]
    count = min(rows, nq)
    return [i * nq // count for i in range(count - 1)] + [nq - 1] if count > 0 else []


def scores(
    q: Array,
    k: Array,
    k_scale: Array,
    w: Array,
    ks: Array | None = None,
    ke: Array | None = None,
    *,
    rows: int | Sequence[int] | None = None,
    reference: Reference | None = None,
    threads: int = 0,
) -> np.ndarray:
    """Reference scores of every visible key, by plain scalar code.

    Parameters
    ----------
    q, k, k_scale, w, ks, ke : array
        As `topk` takes them; copied from a GPU.
    rows : int or sequence of int, optional
        Queries: that many, evenly spread, or these; default: all.
    reference : {"cpu", "sm90"}, optional
        Whose arithmetic: this library's on a CPU, or that of DeepGEMM's SM90 kernels and of the cuda backend, emulated.
        Default: "sm90" if q is on a GPU.
    threads : int
        0: one per CPU this process may use.

    Returns
    -------
    ndarray, float32 [rows, keys]
        -inf where a key is not visible; NaN scores as 0x7FC00000.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `topk`.

    Notes
    -----
    Cost: some 2 microseconds a score of 32 heads and thread ("sm90": 100 times that).
    """
    chosen = spread_rows(extents(q, k)[0], rows)
    out = host_empty((len(chosen), int(k.shape[0])), np.float32)
    _core.scores(_host_problem(q, k, k_scale, w, ks, ke), chosen, _reference(reference, q), threads, out)
    return out


def _host_problem(*arrays: Array | None) -> tuple:
    return problem_of(*(None if array is None else to_host(array) for array in arrays))


def _reference(reference: Reference | None, q: Array) -> Reference:
    return reference or ("sm90" if on_gpu(q) else "cpu")


class Verification(NamedTuple):
    """What `verify` found.

    Attributes
    ----------
    equal : bool
    rows : int
        Rows that were compared.
    differences : list of str
        One line for each row that differs: the first slot, what it holds and what it should hold.
    """

    equal: bool
    rows: int
    differences: list[str]


def verify(
    q: Array,
    k: Array,
    k_scale: Array,
    w: Array,
    ks: Array | None = None,
    ke: Array | None = None,
    *,
    ids: Array,
    scores: Array | None = None,
    rows: int | Sequence[int] | None = 8,
    order: Literal["score", "ascending", "any"] = "score",
    ties: Literal["lower_id", "any"] = "lower_id",
    index_space: IndexSpace = "absolute",
    reference: Reference | None = None,
    threads: int = 0,
) -> Verification:
    """Compare a selection, dosa's or anybody's, with full scoring and a full sort.

    Parameters
    ----------
    q, k, k_scale, w, ks, ke : array
        As `topk` takes them; they, ids and scores are copied from a GPU.
    ids : array, int32 [queries, topk]
    scores : array, float32 [queries, topk], optional
        Compared bit for bit where given.
    rows : int or sequence of int, optional
        Queries to compare: that many, evenly spread, or these; None: all.
    order : {"score", "ascending", "any"}
        How the ids of a row must be arranged.
    ties : {"lower_id", "any"}
        "any": of keys with equal scores any may have been selected; ids must be valid and distinct, and their reference
        scores the K best as a multiset.
    index_space, reference, threads
        As in `topk` and `scores`.

    Returns
    -------
    Verification

    Raises
    ------
    ArgumentError
        The shapes of ids or scores, or what `topk` refuses.

    Notes
    -----
    Cost: as `scores`.
    """
    nq = extents(q, k)[0]
    problem = _host_problem(q, k, k_scale, w, ks, ke)
    first = np.zeros(nq, np.int64) if ks is None or index_space == "absolute" else np.maximum(to_host(ks), 0)
    how = (_reference(reference, q), order, ties, index_space, threads)
    return _compare(problem, nq, int(k.shape[0]), first, ids, scores, rows, *how)


def verify_paged(
    q: Array,
    kv_cache: Array,
    w: Array,
    context_lens: Array,
    block_table: Array,
    *,
    ids: Array,
    scores: Array | None = None,
    ks: Array | None = None,
    requests: Array | None = None,
    rows: int | Sequence[int] | None = 8,
    order: Literal["score", "ascending", "any"] = "score",
    index_space: IndexSpace = "absolute",
    reference: Reference | None = None,
    threads: int = 0,
) -> Verification:
    """`verify` with keys in pages.

    Parameters
    ----------
    q, kv_cache, w, context_lens, block_table, ks, requests : array
        As `topk_paged` takes them; copied from a GPU.
    ids, scores, rows, order, index_space, reference, threads
        As in `verify`; of keys with equal scores the lower positions must have been selected.

    Returns
    -------
    Verification

    Raises
    ------
    ArgumentError
        As `verify`.
    """
    nq, nk, *_ = paged_extents(q, kv_cache, block_table)
    arrays = [to_host(array) for array in (q, kv_cache, w, context_lens, block_table)]
    more = {name: None if array is None else to_host(array) for name, array in (("ks", ks), ("requests", requests))}
    how = (_reference(reference, q), order, "lower_id", index_space, threads)
    return _compare(paged_problem_of(*arrays, **more), nq, nk, np.zeros(nq, np.int64), ids, scores, rows, *how)


def _compare(problem, nq, nk, first, ids, scores, rows, reference, order, ties, index_space, threads) -> Verification:
    """`first`: what the oracle's absolute ids are ahead of the given ones in each row, where any of equal keys will do."""
    if order not in ("score", "ascending", "any"):
        raise ArgumentError(f"order is '{order}'; allowed are score, ascending, any")
    if ties not in ("lower_id", "any"):
        raise ArgumentError(f"ties is '{ties}'; allowed are lower_id, any")
    given = to_host(ids)
    if given.ndim != 2 or given.shape[0] != nq:
        raise ArgumentError(f"ids has shape {list(given.shape)}; it must be [{nq}, topk]")
    given_scores = None if scores is None else to_host(scores)
    if given_scores is not None and given_scores.shape != given.shape:
        raise ArgumentError(f"scores has shape {list(given_scores.shape)}; ids has {list(given.shape)}")
    chosen = spread_rows(nq, rows)
    shape = (len(chosen), given.shape[1])
    expected_ids, expected_scores = host_empty(shape, np.int32), host_empty(shape, np.float32)
    placed = "score" if order == "any" else order
    _core.oracle(problem, shape[1], chosen, reference, placed, index_space, threads, expected_ids, expected_scores)

    differences = []
    for i, row in enumerate(chosen):
        row_ids, row_scores = given[row], None if given_scores is None else given_scores[row]
        want_ids, want_scores = expected_ids[i], expected_scores[i]
        if ties == "any":
            true = np.full(nk + 1, -np.inf, np.float32)[None]
            _core.scores(problem, [row], reference, threads, true[:, :-1])
            found = _tied_difference(row_ids, row_scores, int(first[row]), true[0], want_ids, want_scores, order)
        else:
            if order == "any":
                row_ids, row_scores = _by_id(row_ids, row_scores)
                want_ids, want_scores = _by_id(want_ids, want_scores)
            found = _first_difference(row_ids, row_scores, want_ids, want_scores)
        if found:
            differences.append(f"row {row}, {found}")
    return Verification(not differences, len(chosen), differences)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def _by_id(ids: np.ndarray, scores: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Ascending ids, -1 last."""
    order = np.argsort(np.where(ids < 0, np.iinfo(np.int64).max, ids.astype(np.int64)), kind="stable")
    return ids[order], None if scores is None else scores[order]


def _first_difference(ids, scores, want_ids, want_scores) -> str | None:
    wrong = ids != want_ids
    if scores is not None:
        wrong = wrong | (_bits(scores) != _bits(want_scores))
    if not wrong.any():
        return None
    slot = int(np.argmax(wrong))
    has = f"id {ids[slot]}" + ("" if scores is None else f" score {scores[slot]}")
    return f"slot {slot}: {has}, expected id {want_ids[slot]} score {want_scores[slot]}"


def _tied_difference(ids, scores, first, true, want_ids, want_scores, order) -> str | None:
    """As above where any of several equal keys will do. `true` has the score of every key, and one more entry."""
    valid = int(np.count_nonzero(want_ids >= 0))
    if (ids[:valid] < 0).any() or (ids[valid:] != -1).any():
        return f"{valid} valid ids must come first and -1 after them"
    keys = ids[:valid].astype(np.int64) + first
    if len(np.unique(keys)) != valid:
        return "an id is repeated"
    if (keys >= len(true) - 1).any() or (true[keys] == -np.inf).sum() > (want_scores[:valid] == -np.inf).sum():
        return "an id lies outside the visible range"
    got = true[keys]
    if order == "ascending" and (np.diff(ids[:valid]) <= 0).any():
        return "ids are not ascending"
    if order == "score" and (_rank(got)[1:] < _rank(got)[:-1]).any():
        return "scores are not descending"
    if scores is not None and (_bits(scores[:valid]) != _bits(got)).any():
        slot = int(np.argmax(_bits(scores[:valid]) != _bits(got)))
        return f"slot {slot}: score {scores[slot]} of id {ids[slot]}, expected {got[slot]}"
    if (np.sort(_rank(got)) != np.sort(_rank(want_scores[:valid]))).any():
        return "the scores of the ids are not the best ones"
    return None


def _rank(scores: np.ndarray) -> np.ndarray:
    """Ascending where scores descend; -0 equals +0, NaN comes last."""
    return np.nan_to_num(-scores.astype(np.float64), nan=2e300, posinf=1e300, neginf=-1e300) + 0.0


def explain(
    q: Array,
    k: Array,
    k_scale: Array,
    w: Array,
    ks: Array | None = None,
    ke: Array | None = None,
    topk: int = 2048,
    *,
    rows: int | Sequence[int] | None = 8,
    sampled_keys: int = 4096,
    rounds: int = 3,
    indexer_share: float = 0.73,
    audit: bool = False,
    **options: Unpack[Options],
) -> dict[str, Any]:
    """Why a selection took what it took: slack, margins, predicted and measured work.

    Parameters
    ----------
    q, k, k_scale, w, ks, ke, topk
        As `topk` takes them, in host memory: runs of the cpu backend are looked into.
    rows : int or sequence of int, optional
        Queries to look into: that many, evenly spread, or these; None: all.
    sampled_keys : int
        Keys per query whose bounds are looked into.
    rounds : int
        Timed runs, with full scoring in between; medians are kept.
    indexer_share : float
        The indexer's share of the prefill time, for what the whole gains; 0.73 is GLM-5.2 at a million tokens.
    audit : bool
        Check the bound of every sampled key in plain scalar code; adds "audit".
    **options : Options
        Method "auto" or "dosa".

    Returns
    -------
    dict
        The fields of ``dosa explain --json``: "shape", "stats", "seconds", "dense_seconds", "predicted_work",
        "measured_work", "budgets" (what other row budgets would cost) and "rows" (a dict for each query). Slack and margins
        are in standard deviations of a query's scores.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `topk`; another method.

    Notes
    -----
    Cost: the runs, and some 0.1 s a row.
    """
    if on_gpu(q):
        raise UnsupportedError("explain looks into runs of the cpu backend; what a GPU run counted: Indexer.counters")
    chosen = spread_rows(extents(q, k)[0], rows)
    problem = problem_of(q, k, k_scale, w, ks, ke)
    line = _core.explain(problem, topk, dict(options), chosen, sampled_keys, rounds, indexer_share, audit)
    return json.loads(line)
