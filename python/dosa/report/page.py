"""One self-contained HTML page: charts.json filled with tables, and the Vega libraries inside."""

from __future__ import annotations

import html
import json
import math
import re
from importlib import resources
from typing import Any, Callable

from .. import __version__
from .tables import Tables

_DRAW = """
const draw = (dark) => {
  const ink = dark ? "#d5d9e0" : "#26303c", faint = dark ? "#39424e" : "#dfe3e8";
  const config = {
    background: "transparent", font: "system-ui, sans-serif",
    view: { stroke: null }, title: { color: ink },
    axis: { labelColor: ink, titleColor: ink, gridColor: faint, domainColor: faint, tickColor: faint, labelLimit: 300 },
    range: { category: { scheme: "%s" } },
    legend: { labelColor: ink, titleColor: ink, symbolBaseStrokeColor: ink, orient: "bottom", columns: 2, labelLimit: 400 },
  };
  const charts = JSON.parse(document.getElementById("charts").textContent);
  return Promise.all(Object.entries(charts).map(([id, spec]) =>
    vegaEmbed("#" + id, spec, { config, renderer: "svg", actions: { export: true, source: false, compiled: false, editor: false } })));
};
const scheme = window.matchMedia("(prefers-color-scheme: dark)");
const redraw = () => draw(scheme.matches)
  .then(() => { document.body.dataset.drawn = scheme.matches ? "dark" : "light"; })
  .catch((error) => { document.body.dataset.failed = String(error); });
scheme.addEventListener("change", redraw);
redraw();
"""


def render(tables: Tables, title: str = "What dosa skips, and why it may") -> str:
    """The page as HTML text.

    Parameters
    ----------
    tables : dict of lists of dicts
        As `dosa.report.tables.measure` returns them. Charts without rows are left out.
    title : str
        Of the page.

    Returns
    -------
    str
        A complete document of about a megabyte that loads nothing.

    Notes
    -----
    Needs vl-convert-python, which brings the Vega libraries.
    """
    import vl_convert

    files = resources.files(__package__)
    sections, specs = [], {}
    for chart in json.loads((files / "charts.json").read_text()):
        rows = tables.get(chart["table"])
        if not rows:
            continue
        specs[chart["id"]] = _fill(chart["spec"], rows)
        sections.append(_section(chart))
    scheme = "tableau20" if len(tables.get("traces", [])) > 10 else "tableau10"
    parts = {
        "title": html.escape(title),
        "version": __version__,
        "summary": _summary(tables.get("traces", [])),
        "sections": "\n".join(sections),
        "charts": json.dumps(specs).replace("<", "\\u003c"),
        "script": vl_convert.javascript_bundle(_DRAW % scheme).replace("</script", "<\\/script"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], (files / "page.html").read_text())


def _fill(spec: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The chart with its data, as wide as the page; a height by step becomes a number, so that Vega-Lite can fit it."""
    height = spec["height"]
    if isinstance(height, dict):
        bands = [channel["field"] for name, channel in spec["encoding"].items() if name in ("y", "yOffset")]
        height = height["step"] * math.prod(len({row[field] for row in rows}) for field in bands)
    return {**spec, "height": height, "width": "container", "data": {"values": rows}}


def _section(chart: dict[str, Any]) -> str:
    heading, text = html.escape(chart["title"]), html.escape(chart["text"])
    return f'<section><h2>{heading}</h2><p>{text}</p><div class="frame"><div class="chart" id="{chart["id"]}"></div></div></section>'


def _summary(traces: list[dict[str, Any]]) -> str:
    if not traces:
        return ""
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "trace": ("Trace", str),
        "queries": ("Queries", str),
        "topk": ("Kept", str),
        "rejected": ("Rejected", lambda share: f"{100 * share:.1f} %"),
        "predicted": ("Predicted", lambda speed: "-" if speed is None else f"{speed:.2f}x"),
        "measured": ("Measured", lambda speed: f"{speed:.2f}x"),
        "whole": ("Whole prefill", lambda speed: "-" if speed is None else f"{speed:.2f}x"),
    }
    head = "".join(f"<th>{words}</th>" for words, _ in columns.values())
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(show(row[name]))}</td>" for name, (_, show) in columns.items()) + "</tr>"
        for row in traces
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
