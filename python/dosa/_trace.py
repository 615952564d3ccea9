"""Traces: indexer activations on disk."""

from __future__ import annotations

import os
from typing import Mapping, NamedTuple

from . import _core
from ._arrays import Array
from ._indexer import problem_of


class Problem(NamedTuple):
    """One selection problem, in the order in which every call takes it: ``dosa.topk(*problem)``."""

    q: Array
    k: Array
    k_scale: Array
    w: Array
    ks: Array | None = None
    ke: Array | None = None


class PagedProblem(NamedTuple):
    """A selection problem with keys in pages, in the order in which ``dosa.topk_paged(*problem)`` takes it."""

    q: Array
    kv_cache: Array
    w: Array
    context_lens: Array
    block_table: Array


class DecodeTrace(NamedTuple):
    """A decode trace: ``steps, metadata = dosa.load_decode_trace(path)``."""

    steps: list[PagedProblem]
    metadata: dict[str, str]


class Trace(NamedTuple):
    """A trace file: ``problem, metadata = dosa.load_trace(path)``."""

    problem: Problem
    metadata: dict[str, str]


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Map a trace file (safetensors).

    Parameters
    ----------
    path : str or path
        Tensors q F8_E4M3 or U8 [queries, heads, dim], k F8_E4M3 or U8 [keys, dim], k_scale F32 [keys], w F32
        [queries, heads], and q_pos I32 [queries] (the query sees keys 0..q_pos) or ks and ke I32 [queries]. Others are
        ignored.

    Returns
    -------
    Trace
        Read-only NumPy arrays over the mapped file (FP8 as uint8), which stays mapped as long as one of them lives.

    Raises
    ------
    FileError
        The file cannot be read, or is not such a trace.
    """
    *arrays, metadata = _core.load_trace(os.fspath(path))
    return Trace(Problem(*arrays), dict(metadata))


def load_decode_trace(path: str | os.PathLike[str]) -> DecodeTrace:
    """Map a trace of decoding (safetensors): T steps of B requests with n draft tokens each.

    Parameters
    ----------
    path : str or path
        Tensors q F8_E4M3 or U8 [T, B, n, heads, dim], w F32 [T, B, n, heads], context_lens I32 [T, B, n], block_table I32
        [B, max_blocks] and kv_cache U8 or F8_E4M3 [pages, page_size, 1, dim + 4]. Others are ignored.

    Returns
    -------
    DecodeTrace
        A problem for each step, q [B * n, heads, dim]: read-only NumPy arrays over the mapped file, which stays mapped as
        long as one of them lives. Steps share the cache and the table.

    Raises
    ------
    FileError
        The file cannot be read, or is not such a trace.
    """
    steps, metadata = _core.load_decode_trace(os.fspath(path))
    return DecodeTrace([PagedProblem(*step) for step in steps], dict(metadata))


def save_trace(
    path: str | os.PathLike[str],
    q: Array,
    k: Array,
    k_scale: Array,
    w: Array,
    ks: Array | None = None,
    ke: Array | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a trace that `load_trace` and the program read.

    Parameters
    ----------
    path : str or path
        Written whole or not at all.
    q, k, k_scale, w, ks, ke : array
        As `topk` takes them, in host memory.
    metadata : mapping of str to str, optional
        Kept with the trace; the report reads "layer" and "domain".

    Raises
    ------
    FileError
        The file cannot be written.
    ArgumentError
        What `topk` refuses.
    """
    _core.save_trace(os.fspath(path), problem_of(q, k, k_scale, w, ks, ke), dict(metadata or {}))
