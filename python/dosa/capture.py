"""Recording a running model's indexer inputs as traces, which the program, the report and `dosa.load_trace` read.

    with dosa.capture.transformers(model, "traces/mine", layers={0, 10}) as recorder:
        model(**inputs)
    print(recorder.paths)

`Recorder.record` takes the arrays of anything else, from wherever an engine has them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from typing import Any, Collection, Iterator, Mapping

import numpy as np

from . import prepare
from ._arrays import Array, to_host
from ._errors import ArgumentError
from ._trace import Problem, save_trace

_log = logging.getLogger("dosa")

INDEXERS: dict[str, str] = {"DeepseekV32Indexer": "deepseek_v32", "GlmMoeDsaIndexer": "glm_moe_dsa"}
"""Class names of the indexers that `transformers` knows, and their models."""

ARGUMENTS = ("hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids", "cache")
"""What their forward is given, in order."""


class Recorder:
    """Writes traces into a folder, sampled and bounded.

    Parameters
    ----------
    directory : path
        Made if it is not there. Files are named layer-L-call-N.safetensors; N counts on from those that are there.
    layers : collection of int, optional
        Layers to record; default: all.
    queries : int
        Most queries of a call to keep, evenly spread and ending with the last.
    min_keys : int
        Calls that see fewer keys are passed over.
    max_bytes : int
        Of all files together; a trace that would exceed it is not written, and the reason is logged once.
    metadata : mapping of str to str, optional
        Kept with each trace beside "layer" and "call"; the report names traces by "domain" and "model" too.

    Attributes
    ----------
    paths : list of Path
        Files written so far.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        layers: Collection[int] | None = None,
        queries: int = 256,
        min_keys: int = 4096,
        max_bytes: int = 1 << 30,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if queries < 1:
            raise ArgumentError(f"queries is {queries}; allowed are 1 and more")
        self.directory = pathlib.Path(directory)
        self.layers, self.queries, self.min_keys, self.max_bytes = layers, queries, min_keys, max_bytes
        self.metadata = dict(metadata or {})
        self.paths: list[pathlib.Path] = []
        self._bytes = 0
        self._calls: dict[int, int] = {}
        self._full = False

    def wants(self, layer: int, keys: int) -> bool:
        """Whether a call of this layer with so many keys is to be recorded."""
        return not self._full and keys >= self.min_keys and (self.layers is None or layer in self.layers)

    def sample(self, queries: int) -> np.ndarray:
        """Rows to keep of a call with so many queries, int64."""
        count = min(self.queries, queries)
        return np.arange(queries - 1, -1, -1)[np.arange(count) * queries // max(count, 1)][::-1].copy()

    def record(
        self,
        layer: int,
        q: Array,
        k: Array,
        k_scale: Array,
        w: Array,
        ks: Array | None = None,
        ke: Array | None = None,
    ) -> pathlib.Path | None:
        """Keep a sample of one indexer call.

        Parameters
        ----------
        layer : int
        q, k, k_scale, w, ks, ke : array
            As `dosa.topk` takes them, on any device; copied to the host.

        Returns
        -------
        Path or None
            The file; None if the call is not wanted or there is no room left.
        """
        if not self.wants(layer, int(k.shape[0])):
            return None
        rows = self.sample(int(q.shape[0]))
        q, k, k_scale, w, ks, ke = (None if array is None else to_host(array) for array in (q, k, k_scale, w, ks, ke))
        kept = Problem(q[rows], k, k_scale, w[rows], *(None if edge is None else edge[rows] for edge in (ks, ke)))
        size = sum(array.nbytes for array in kept if array is not None)
        if self._bytes + size > self.max_bytes:
            self._full = True
            _log.warning("capture stops: %d of %d bytes are written and %d more wanted", self._bytes, self.max_bytes, size)
            return None
        self.directory.mkdir(parents=True, exist_ok=True)
        call = self._calls.get(layer, -1) + 1
        while (path := self.directory / f"layer-{layer}-call-{call}.safetensors").exists():
            call += 1
        self._calls[layer] = call
        save_trace(path, *kept, metadata={**self.metadata, "layer": str(layer), "call": str(call)})
        self._bytes += size
        self.paths.append(path)
        return path


@contextlib.contextmanager
def transformers(model: Any, directory: str | os.PathLike[str], **sampling: Any) -> Iterator[Recorder]:
    """Record the indexers of a transformers model (deepseek_v32, glm_moe_dsa) while the context is open.

    Parameters
    ----------
    model : torch.nn.Module
        Any module that holds such indexers.
    directory, **sampling
        As `Recorder` takes them.

    Yields
    ------
    Recorder

    Raises
    ------
    ArgumentError
        The model holds no indexer of a known class.

    Notes
    -----
    The model computes what it computed before. transformers scores unquantised; what is recorded is rotated and quantised
    as `dosa.prepare` does, with power-of-two scales. Of a batch each sequence is a call of its own. Cost: the queries' and
    keys' projections once more, for recorded calls.
    """
    found = [module for module in model.modules() if type(module).__name__ in INDEXERS]
    if not found:
        raise ArgumentError(f"{type(model).__name__} holds no indexer; known are {', '.join(sorted(INDEXERS))}")
    recorder = Recorder(directory, **sampling)
    hooks = [
        module.register_forward_hook(lambda *call: _record_call(recorder, *call), with_kwargs=True) for module in found
    ]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()
    if not recorder.paths:
        layers = "any layer" if recorder.layers is None else f"layers {sorted(recorder.layers)}"
        _log.warning("nothing was captured: no call of %s saw %d keys (min_keys)", layers, recorder.min_keys)


def _record_call(recorder: Recorder, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    given = {**dict(zip(ARGUMENTS, args)), **kwargs}
    if recorder.wants(module.layer_idx, int(given["attention_mask"].shape[-1])):
        for problem in indexer_problems(module, **given):
            recorder.record(module.layer_idx, *problem)


def indexer_problems(
    module: Any,
    hidden_states: Any,
    q_resid: Any,
    position_embeddings: tuple[Any, Any],
    attention_mask: Any,
    position_ids: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
) -> Iterator[Problem]:
    """The selection problems of one call of a transformers indexer, after the call.

    Parameters
    ----------
    module : DeepseekV32Indexer or GlmMoeDsaIndexer
    hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache
        What its forward was given. A cache must hold this call's keys already; `past_key_values` is its older name.

    Yields
    ------
    Problem
        One for each sequence of the batch, host arrays; rotated and quantised as `dosa.prepare` does.

    Raises
    ------
    ArgumentError
        The mask is none of one range of keys a query.
    """
    import torch

    def numpy(tensor: Any) -> np.ndarray:
        return tensor.detach().to("cpu", torch.float32).numpy()

    linears = (module.wq_b.weight, module.wk.weight, module.k_norm.weight, module.k_norm.bias, module.weights_proj.weight)
    weights = prepare.Weights(*map(numpy, linears))
    rope = prepare.ROPE[INDEXERS[type(module).__name__]]
    hidden, resid = numpy(hidden_states), numpy(q_resid)
    # Both halves of the last axis are the same angles.
    cos, sin = (numpy(part)[..., : part.shape[-1] // 2] for part in position_embeddings)
    mask = attention_mask.detach().cpu()
    visible = (mask if mask.dtype == torch.bool else mask >= 0).numpy()
    keys = visible.shape[-1]
    cache = past_key_values if cache is None else cache
    cached = None if cache is None else numpy(cache.layers[module.layer_idx].indexer_keys)
    for i in range(len(hidden)):
        angles = cos[min(i, len(cos) - 1)], sin[min(i, len(sin) - 1)]
        queries = prepare.prepare_queries(weights, hidden[i], resid[i], *angles, rope=rope)
        k = prepare.k_float(weights, hidden[i], *angles, rope) if cached is None else cached[i, :keys]
        if cached is not None and rope == "interleaved":
            k = _interleave(k, 2 * angles[0].shape[-1])
        made = prepare.Keys(*prepare.quantize(prepare.hadamard(k)), rotated=True)
        yield prepare.problem(queries, made, *_ranges(visible[min(i, len(visible) - 1)].reshape(-1, keys)))


def _interleave(k: np.ndarray, turned: int) -> np.ndarray:
    """transformers' cache holds the turned pairs of layout "interleaved" apart: firsts, then seconds."""
    together = k.copy()
    together[:, 0:turned:2], together[:, 1:turned:2] = k[:, : turned // 2], k[:, turned // 2 : turned]
    return together


def _ranges(visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ks and ke of a mask bool [queries, keys] whose rows see one stretch each."""
    any_key = visible.any(axis=-1)
    ks = np.where(any_key, visible.argmax(axis=-1), 0).astype(np.int32)
    ke = np.where(any_key, visible.shape[-1] - visible[:, ::-1].argmax(axis=-1), 0).astype(np.int32)
    if (visible.sum(axis=-1) != ke - ks).any():
        raise ArgumentError("attention_mask has rows that see several stretches of keys; a trace has one range a query")
    return ks, ke
