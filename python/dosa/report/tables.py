"""The numbers of a report: lists of flat rows, one list for each chart."""

from __future__ import annotations

import json
import math
import pathlib
from collections import defaultdict
from statistics import mean
from typing import Any, Callable, Iterable

import numpy as np

from .. import ArgumentError, FileError, Problem, Trace, explain, load_trace

Tables = defaultdict[str, list[dict[str, Any]]]

SMALLEST_CONTEXT = 4096
SLACK_PARTS = {
    "projection": "omitted positive heads",
    "left_out": "negative heads left out",
    "aggregate": "negative heads summed",
    "integers": "rounding to integers",
    "allowances": "arithmetic",
}


def measure(
    paths: Iterable[pathlib.Path],
    topk: int = 2048,
    rows: int = 8,
    indexer_share: float = 0.73,
    progress: Callable[[str], None] = lambda step: None,
) -> Tables:
    """Explain every trace, read every JSON line, take numbers that are there already.

    Parameters
    ----------
    paths : paths
        Traces (.safetensors), files of JSON lines that ``dosa bench --json`` or ``dosa explain --json`` printed (.jsonl), and
        what `save` wrote (.json).
    topk : int
        Keys to keep per query.
    rows : int
        Queries of each trace that are looked into.
    indexer_share : float
        The indexer's share of the prefill time.
    progress : callable
        Told each step before it starts.

    Returns
    -------
    dict of lists of dicts
        By chart: "traces", "pruning", "budgets", "slack", "seeds", "heads", "context", "whole", "bench", "stages".
    """
    tables: Tables = defaultdict(list)
    for path in paths:
        if path.suffix == ".jsonl":
            progress(f"reading {path.name}")
            _read_lines(tables, path, indexer_share)
        elif path.suffix == ".json":
            progress(f"reading {path.name}")
            _read_numbers(tables, path)
        else:
            _measure_trace(tables, path, topk, rows, indexer_share, progress)
    if not any(tables.values()):
        raise ArgumentError("there is nothing to report: no trace, and no line of kind bench or explain")
    return tables


def _measure_trace(tables: Tables, path: pathlib.Path, topk: int, rows: int, share: float, progress) -> None:
    trace = load_trace(path)
    name = _unique(tables["traces"], "trace", _name(trace, path), path.stem)
    progress(f"explaining {path.name}")
    told = explain(*trace.problem, topk=topk, rows=rows, indexer_share=share)
    _add_explanation(tables, name, told, share)
    _add_heads(tables, name, trace.problem)
    for seeds in ("largest-bounds", "chain", "nearest-spread"):
        progress(f"seeding {path.name} by {seeds}")
        _add_seeds(tables, name, seeds, explain(*trace.problem, topk=topk, rows=4, rounds=1, method="dosa", seeds=seeds))
    for problem in shorter_contexts(trace.problem):
        keys = len(problem.k)
        progress(f"timing {path.name} at {keys} keys")
        _add_context(tables, name, keys, explain(*problem, topk=topk, rows=0, method="dosa"))


def shorter_contexts(problem: Problem) -> Iterable[Problem]:
    """The problem with all its keys, then with the latest half of them, a quarter, ... as if the text began there."""
    nk = len(problem.k)
    keys = nk
    while keys >= SMALLEST_CONTEXT or keys == nk:
        cut = nk - keys
        ranges = [None if edge is None else np.asarray(edge) - np.int32(cut) for edge in (problem.ks, problem.ke)]
        yield Problem(problem.q, problem.k[cut:], problem.k_scale[cut:], problem.w, *ranges)
        keys //= 2


def _unique(rows: list[dict[str, Any]], column: str, name: str, hint: str = "") -> str:
    """The name, told apart from those in use by a hint or a number: charts would add up what is called the same."""
    taken = {row[column] for row in rows}
    more = ([f"{name} ({hint})"] if hint else []) + [f"{name} ({number})" for number in range(2, len(taken) + 3)]
    return next(candidate for candidate in [name, *more] if candidate not in taken)


def _name(trace: Trace, path: pathlib.Path) -> str:
    """ "english, GLM, layer 4, 32 heads, 32K keys": what a reader can place; the file's name where the trace says nothing."""
    told = trace.metadata
    nk, heads = len(trace.problem.k), trace.problem.q.shape[1]
    words = [told[word] for word in ("domain", "model") if told.get(word)]
    words += [f"layer {told['layer']}"] if told.get("layer") else []
    return ", ".join((words or [path.stem]) + [f"{heads} heads", f"{nk // 1024}K keys" if nk >= 1024 else f"{nk} keys"])


def _add_explanation(tables: Tables, name: str, told: dict[str, Any], share: float) -> None:
    stats, shape = told["stats"], told["shape"]
    visible = max(stats["visible"], 1)
    rejected = (stats["screened"] - stats["survivors"]) / visible
    scored = (stats["seeds"] + stats["refined"] + stats["full"]) / visible
    parts = {
        "rejected by a bound": rejected,
        "overtaken by a rising tau": max(0, 1 - rejected - scored),
        "scored in full": scored,
    }
    for rank, (outcome, part) in enumerate(parts.items()):
        tables["pruning"].append({"trace": name, "outcome": outcome, "share": part, "rank": rank})
    speed = told["dense_seconds"] / told["seconds"]
    tables["traces"].append(
        {
            "trace": name,
            "queries": shape["nq"],
            "keys": shape["nk"],
            "topk": shape["topk"],
            "rejected": rejected,
            "predicted": 1 / told["predicted_work"] if told["predicted_work"] else None,
            "measured": speed,
            "whole": told["whole_measured"],
            "dense_ms": 1e3 * told["dense_seconds"],
        }
    )
    for budget in told["budgets"]:
        tables["budgets"].append({"trace": name, **budget})
    samples = [row["sample"] for row in told["rows"] if "sample" in row]
    for rank, (part, words) in enumerate(SLACK_PARTS.items()):
        values = [sample["slack_near_tau_sd"][part] for sample in samples]
        values = [value for value in values if value is not None]  # null: no such number
        if values:
            tables["slack"].append({"trace": name, "part": words, "sd": mean(values), "rank": rank})
    for step in range(0, 101, 2):
        tables["whole"].append(
            {"trace": name, "share": step / 100, "whole": 1 / (1 - step / 100 + step / 100 / speed), "at": share}
        )


def _add_heads(tables: Tables, name: str, problem: Problem) -> None:
    w = np.asarray(problem.w)
    positive = np.sort((w > 0).mean(axis=0))[::-1]
    for head, part in enumerate(positive):
        tables["heads"].append({"trace": name, "head": head, "positive": float(part)})


def _add_seeds(tables: Tables, name: str, seeds: str, told: dict[str, Any]) -> None:
    samples = [row["sample"] for row in told["rows"] if "sample" in row]
    deficits = [sample["deficit_sd"] for sample in samples if sample["deficit_sd"] is not None]
    if not deficits:
        return
    stats = told["stats"]
    survivors = stats["survivors"] / max(stats["screened"], 1)
    tables["seeds"].append({"trace": name, "seeds": seeds, "deficit": mean(deficits), "survivors": survivors})


def _add_context(tables: Tables, name: str, keys: int, told: dict[str, Any]) -> None:
    if not told["predicted_work"]:
        return  # nothing was screened, so nothing was predicted
    for kind, speed in (("predicted", 1 / told["predicted_work"]), ("measured", told["dense_seconds"] / told["seconds"])):
        tables["context"].append({"trace": name, "keys": keys, "kind": kind, "speed": speed})


def _read_lines(tables: Tables, path: pathlib.Path, share: float) -> None:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            told = json.loads(line)
            kind = told["kind"] if isinstance(told, dict) and told.get("dosa") == 1 else None
            if kind == "bench":
                _add_bench(tables, told)
            elif kind == "explain":
                _add_explanation(tables, _unique(tables["traces"], "trace", _case(told)), told, share)
        except (ValueError, KeyError) as error:
            raise FileError(f"{path}:{number}: not a line of dosa's JSON: {error!r}") from error


def save(path: pathlib.Path, tables: Tables) -> None:
    """Write the numbers of a report, for `measure` to read again: by table, the names of its columns and its rows."""
    packed = {
        name: {"columns": list(rows[0]), "rows": [[_short(value) for value in row.values()] for row in rows]}
        for name, rows in tables.items()
        if rows
    }
    path.write_text(json.dumps({"dosa": 1, "kind": "report", "tables": packed}, separators=(",", ":")) + "\n")


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _read_numbers(tables: Tables, path: pathlib.Path) -> None:
    try:
        told = json.loads(path.read_text())
        if (told["dosa"], told["kind"]) != (1, "report"):
            raise ValueError("another kind")
        for name, table in told["tables"].items():
            tables[name] += [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path}: not the numbers of a report: {error!r}") from error


def _case(told: dict[str, Any]) -> str:
    return f"{told['case']}, topk {told['shape']['topk']}"


def _add_bench(tables: Tables, told: dict[str, Any]) -> None:
    case = _unique(tables["stages"], "case", _case(told))
    for method in told["methods"]:
        over = method.get("over_dense")
        if over is not None and math.isfinite(over):
            tables["bench"].append({"case": case, "method": method["method"], "over_dense": over})
        for stage, seconds in method["stats"]["thread_seconds"].items():
            tables["stages"].append({"case": case, "method": method["method"], "stage": stage, "ms": 1e3 * seconds})
