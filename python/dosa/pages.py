"""Keys in pages, as serving engines cache them: writing, reading and moving them in host memory.

A slot is a key's place in a pool: page * page_size + offset. `dosa.topk_paged` says how a page is laid out.
"""

from __future__ import annotations

import numpy as np

from . import _core
from ._arrays import Array, host_empty, readable


def empty_pool(pages: int, page_size: int = 64, dim: int = 128) -> np.ndarray:
    """A pool of keys, uint8 [pages, page_size, 1, dim + 4], all zero."""
    pool = host_empty((pages, page_size, 1, dim + 4), "uint8")
    pool[:] = 0
    return pool


def insert_keys(
    kv_cache: Array, keys: Array, slots: Array, *, power_of_two: bool = False, floor: float = 1e-4
) -> None:
    """Quantise keys and write each to its slot, values and scale.

    Parameters
    ----------
    kv_cache : array, uint8 [pages, page_size, 1, dim + 4]
        Written in place.
    keys : array, float32 or bfloat16 [n, dim]
    slots : array, int32 [n]
        A negative one skips its key.
    power_of_two, floor
        As `dosa.prepare.quantize` takes them.

    Raises
    ------
    ArgumentError, UnsupportedError
        An array, or a slot outside the pool. Nothing has been written then.

    References
    ----------
    vLLM, ``indexer_k_quant_and_cache``.
    """
    _core.insert_keys(readable(kv_cache), readable(keys), slots, power_of_two, floor)


def gather_keys(kv_cache: Array, blocks: Array, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys at positions [first, first + count) of one request, side by side, bit for bit.

    Parameters
    ----------
    kv_cache : array, uint8 [pages, page_size, 1, dim + 4]
    blocks : array, int32 [max_blocks]
        The request's row of the block table.
    first, count : int

    Returns
    -------
    (uint8 [count, dim], float32 [count])
        Keys and their scales, as `dosa.topk` takes them.

    Raises
    ------
    ArgumentError, UnsupportedError
        An array, or positions or pages that do not exist.

    References
    ----------
    vLLM, ``cp_gather_indexer_k_quant_cache``.
    """
    k = host_empty((count, int(kv_cache.shape[3]) - 4), "uint8")
    k_scale = host_empty((count,), "float32")
    _core.gather_keys(readable(kv_cache), blocks, first, k, k_scale)
    return k, k_scale


def move_keys(source: Array, source_slots: Array, target: Array, target_slots: Array) -> None:
    """Copy keys from slots of one pool to slots of the same or another, bit for bit, one after the other.

    Parameters
    ----------
    source, target : array, uint8 [pages, page_size, 1, dim + 4]
        Page sizes may differ; `target` is written in place.
    source_slots, target_slots : array, int32 [n]
        A negative one skips its pair.

    Raises
    ------
    ArgumentError, UnsupportedError
        An array, or a slot outside its pool. Nothing has been written then.
    """
    _core.move_keys(readable(source), source_slots, readable(target), target_slots)
