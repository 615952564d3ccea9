"""transformers' sparse-attention models (GLM, DeepSeek-V3.2) with their selection replaced by dosa's.

    pip install torch transformers
    python examples/transformers_selection.py [--device cuda]

Runs a small model with random weights three times: as it is, with the selection that a full sort of f32 scores of its FP8
inputs gives, and with dosa's. The last two must agree bit for bit. The inputs of one call are captured, and the trace verified.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import tempfile
from typing import Any, Callable, Iterator

import numpy as np
import torch
import transformers

import dosa
from dosa import capture

Select = Callable[[dosa.Problem, int], Any]
"""A problem on the host and topk to ids [queries, topk], padded with -1."""


def small_model(name: str, device: str) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A model ("DeepseekV32" or "GlmMoeDsa") of two layers that keep 32 keys, and a way to run it: prefill, then a chunk."""
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(
        vocab_size=100, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=2, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32,
        index_n_heads=16, index_head_dim=128, index_topk=32, max_position_embeddings=512,
    )  # fmt: skip
    model = getattr(transformers, name + "Model")(config).eval().to(device)
    tokens = torch.randint(0, 100, (2, 200)).to(device)
    # transformers is about to drop the old name, and earlier versions do not know the new one.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def run() -> torch.Tensor:
        cached = {cache_name: transformers.DynamicCache(config=config)}
        with torch.no_grad():
            parts = [model(part, **cached).last_hidden_state for part in tokens.split([150, 50], 1)]
        return torch.cat(parts, 1)

    return model, run


@contextlib.contextmanager
def selecting(model: torch.nn.Module, select: Select) -> Iterator[list[float]]:
    """Replaces what the model's indexers select while open; yields the shares of ids that theirs have in common with it."""
    shared: list[float] = []

    def replaced(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
        theirs = module.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            selected = theirs(*args, **kwargs)  # fills the cache of keys too
            given = {**dict(zip(capture.ARGUMENTS, args)), **kwargs}
            topk = selected.shape[-1]
            ids = [np.asarray(select(problem, topk)) for problem in capture.indexer_problems(module, **given)]
            for ours, other in zip(ids, selected.cpu().numpy()):
                shared.extend(np.isin(a, b).mean() for a, b in zip(ours, other) if (a >= 0).all())
            made = torch.from_numpy(np.stack(ids)).to(selected)
            return torch.where(made < 0, made[..., :1], made)  # a repeated id is attended to once

        return forward

    indexers = [module for module in model.modules() if type(module).__name__ in capture.INDEXERS]
    try:
        for module in indexers:
            module.forward = replaced(module)
        yield shared
    finally:
        for module in indexers:
            del module.forward  # the class's again


def by_dosa(device: str) -> Select:
    """dosa's selection on a device, screened wherever that is possible."""

    def select(problem: dosa.Problem, topk: int) -> np.ndarray:
        arrays = [None if array is None else torch.from_numpy(array.copy()).to(device) for array in problem]
        return dosa.topk(*arrays, topk=topk, method="dosa").ids.cpu().numpy()

    return select


def by_full_sort(device: str) -> Select:
    """Dense f32 scores of the same FP8 inputs, in the arithmetic that the device has, and a sort."""

    def select(problem: dosa.Problem, topk: int) -> np.ndarray:
        scores = dosa.scores(*problem, reference="sm90" if device == "cuda" else "cpu")
        keys = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
        ids = np.lexsort((keys, -scores))[:, :topk]
        return np.where(np.take_along_axis(scores, ids, 1) == -np.inf, -1, ids).astype(np.int32)

    return select


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    for name in ("DeepseekV32", "GlmMoeDsa"):
        model, run = small_model(name, device)
        unquantised = run()
        with selecting(model, by_full_sort(device)):
            sorted_out = run()
        with selecting(model, by_dosa(device)) as shared:
            same = {"outputs with dosa's selection": torch.equal(run(), sorted_out)}
        with tempfile.TemporaryDirectory() as folder:
            with capture.transformers(model, folder, min_keys=200, queries=16) as recorder:
                same["outputs while capturing"] = torch.equal(run(), unquantised)
            problem = dosa.load_trace(recorder.paths[0]).problem
            ids, scores, _ = dosa.topk(*problem, topk=32, method="dosa")
            same["ids of the captured trace"] = dosa.verify(*problem, ids=ids, scores=scores, rows=None).equal
        differing = ", ".join(what for what, equal in same.items() if not equal)
        verdict = f"DIFFERENT: {differing}" if differing else "as with a full sort"
        difference = (sorted_out - unquantised).abs().max().item()
        print(
            f"{name} on {device}: {verdict}; {np.mean(shared):.1%} of the ids are those of "
            f"unquantised scores (at least {np.min(shared):.1%} in a row), outputs move by at most {difference:.2g}"
        )


if __name__ == "__main__":
    main()
