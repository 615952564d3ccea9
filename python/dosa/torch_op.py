"""``torch.ops.dosa.topk`` and ``topk_paged``: selection as custom operators, so that torch.compile and CUDA graphs can hold it.

Importing this module registers them. They have fake implementations (shapes without data); on a GPU they work on the
current stream, and their workspace comes from PyTorch's allocator.
"""

from __future__ import annotations

from typing import Optional, cast

import torch

from ._indexer import topk as select, topk_paged as select_paged
from ._options import Options


@torch.library.custom_op("dosa::topk", mutates_args=())
def topk(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    w: torch.Tensor,
    ks: Optional[torch.Tensor],
    ke: Optional[torch.Tensor],
    topk: int,
    method: str = "auto",
    order: str = "score",
    index_space: str = "absolute",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the `topk` best keys of every query; see `dosa.topk`.

    Parameters
    ----------
    q, k, k_scale, w, ks, ke, topk, method, order, index_space
        As `dosa.topk` takes them; q and k as float8_e4m3fn or uint8.

    Returns
    -------
    (Tensor, Tensor)
        ids int32 and scores float32 [queries, topk], on q's device.
    """
    arranged = cast(Options, {"method": method, "order": order, "index_space": index_space})
    selection = select(q, k, k_scale, w, ks, ke, topk, **arranged)
    return selection.ids, selection.scores


@topk.register_fake
def _(q, k, k_scale, w, ks, ke, topk, method="auto", order="score", index_space="absolute"):
    shape = (q.shape[0], topk)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("dosa::topk_paged", mutates_args=("recent",))
def topk_paged(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    w: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    recent: Optional[torch.Tensor],
    topk: int,
    method: str = "auto",
    order: str = "score",
    index_space: str = "absolute",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the `topk` best keys of every query from keys in pages; see `dosa.topk_paged`.

    Parameters
    ----------
    q, kv_cache, w, context_lens, block_table, recent, topk, method, order, index_space
        As `dosa.topk_paged` takes them; `recent` is read and written.

    Returns
    -------
    (Tensor, Tensor)
        ids int32 and scores float32 [queries, topk], on q's device.
    """
    arranged = cast(Options, {"method": method, "order": order, "index_space": index_space})
    selection = select_paged(q, kv_cache, w, context_lens, block_table, topk, recent=recent, **arranged)
    return selection.ids, selection.scores


@topk_paged.register_fake
def _(q, kv_cache, w, context_lens, block_table, recent, topk, method="auto", order="score", index_space="absolute"):
    shape = (w.shape[0], topk)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty(shape, dtype=torch.float32)
