"""The options of a run, for type checkers; dosa/options.hpp says what each does, and why its default."""

from __future__ import annotations

from typing import Literal, TypedDict

Method = Literal["auto", "dense", "fused", "dosa"]
Backend = Literal["cpu", "cuda"]
Form = Literal["auto", "base", "absolute", "extended"]
Precision = Literal["auto", "f32", "i8"]
Seeds = Literal["auto", "nearest-spread", "chain", "largest-bounds", "sample"]
Ablation = Literal["none", "no-aggregate", "all-aggregated", "no-projection"]
Order = Literal["score", "ascending"]
IndexSpace = Literal["absolute", "relative", "slot"]
Reference = Literal["cpu", "sm90"]


class Options(TypedDict, total=False):
    """No option changes which keys are selected; `order` and `index_space` arrange them."""

    method: Method
    """ "auto": certified early rejection where it pays, else full scoring"""
    backend: Backend
    """default: where q lives"""
    form: Form
    """of the certificates"""
    row_budget: int
    """bound rows of a certificate, 0..64; 0: chosen from the data"""
    aggregates: int
    """groups of omitted negative heads, 0..4; 0: chosen from the data"""
    precision: Precision
    """arithmetic of the screen"""
    ablation: Ablation
    """part of the certificates that is left out, for experiments"""
    seeds: Seeds
    """which keys are scored first"""
    order: Order
    """best first (default), or by key id"""
    index_space: IndexSpace
    """ids are rows of k (default), count from max(ks, 0), or are a page's keys' places in its pool"""
    threads: int
    """0: one per CPU this process may use"""
    implementation: str
    """CPU kernels by name, one of info()["cpu_implementations"]"""
    memory_budget: int
    """largest workspace, in bytes; 4 GiB unless given"""
    min_context: int
    """method "auto" scores rows in full that see fewer keys; 0: derived from topk"""
    verify_rows: int
    """debug mode: recompute this many rows in full and fail on a difference"""
    time_stages: bool
    """cuda: wait for the run and fill the seconds of Stats, which the cpu backend always does; not for graph capture"""
