"""Exact Top-K selection for DeepSeek Sparse Attention, with most of the scoring left out.

    problem, metadata = dosa.load_trace("traces/demo-h32.safetensors")
    ids, scores, stats = dosa.topk(*problem, topk=2048)

Arrays of NumPy, PyTorch, JAX, CuPy and whatever else exports DLPack go in and come out without a copy; FP8 arrays as
float8_e4m3fn or as uint8 views.

dosa.dropin has the calls that serving engines make today, dosa.pages writes caches of keys, dosa.prepare makes indexer
inputs from hidden states, dosa.capture records a running model's, and ``python -m dosa.report`` draws what became of them.
"""

from __future__ import annotations

import os
from typing import Any

from . import _core, capture, dropin, pages, prepare
from ._check import Verification, explain, scores, verify, verify_paged
from ._core import PathCounts, Plan, Stats
from ._errors import ArgumentError, Error, FileError, UnsupportedError, VerificationError
from ._indexer import Indexer, Selection, empty_workspace, topk, topk_paged
from ._options import Options
from ._trace import DecodeTrace, PagedProblem, Problem, Trace, load_decode_trace, load_trace, save_trace

__version__: str = _core.version()

__all__ = [
    "ArgumentError",
    "DecodeTrace",
    "Error",
    "FileError",
    "Indexer",
    "Options",
    "PagedProblem",
    "PathCounts",
    "Plan",
    "Problem",
    "Selection",
    "Stats",
    "Trace",
    "UnsupportedError",
    "Verification",
    "VerificationError",
    "capture",
    "dropin",
    "empty_workspace",
    "explain",
    "info",
    "load_decode_trace",
    "load_trace",
    "pages",
    "prepare",
    "save_trace",
    "scores",
    "topk",
    "topk_paged",
    "verify",
    "verify_paged",
]


def info() -> dict[str, Any]:
    """What there is on this machine.

    Returns
    -------
    dict
        "version"; "threads", CPUs that this process may use; "cpu_implementations", fastest first; "backends", a list of
        {"name", "available", "reason"}, the reason being why not. The fields of ``dosa info --json``.
    """
    reasons = {name: _core.unavailable_reason(name) for name in ("cpu", "cuda")}
    return {
        "version": __version__,
        "threads": len(os.sched_getaffinity(0)),
        "cpu_implementations": _core.cpu_implementations(),
        "backends": [
            {"name": name, "available": not reason, "reason": reason} for name, reason in reasons.items()
        ],
    }
