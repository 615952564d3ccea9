"""The report: its numbers, and the page as a browser shows it."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, TRACES

import dosa
from dosa.report.__main__ import main
from dosa.report.page import render
from dosa.report.tables import measure, save, shorter_contexts

BENCH = ROOT / "bench" / "cpu" / "xeon-avx512-vnni.jsonl"


@pytest.fixture(scope="module")
def tables():
    return measure([TRACES / "demo-h64.safetensors", BENCH], rows=2)


def test_every_chart_has_its_numbers(tables):
    charts = json.loads((pathlib.Path(dosa.__file__).parent / "report" / "charts.json").read_text())
    assert {chart["table"] for chart in charts} == set(tables) - {"traces"}
    (trace,) = tables["traces"]
    shares = [row["share"] for row in tables["pruning"]]
    assert trace["keys"] == 16384 and sum(shares) == pytest.approx(1) and trace["rejected"] == shares[0] > 0.5
    assert len(tables["heads"]) == 64 and {row["kind"] for row in tables["context"]} == {"predicted", "measured"}
    assert sorted({row["keys"] for row in tables["context"]}) == [4096, 8192, 16384]
    deficits = {row["seeds"]: row["deficit"] for row in tables["seeds"]}
    assert deficits["nearest-spread"] > deficits["chain"] >= 0
    first = json.loads(BENCH.read_text().splitlines()[0])
    assert tables["bench"][2]["over_dense"] == first["methods"][2]["over_dense"]


def test_numbers_can_be_drawn_elsewhere(tables, tmp_path):
    path = tmp_path / "numbers.json"
    save(path, tables)
    again = measure([path])
    assert {name for name in tables if tables[name]} == set(again)
    for name, rows in again.items():
        assert [row.keys() for row in rows] == [row.keys() for row in tables[name]]
    for name in ("measured", "rejected"):
        assert again["traces"][0][name] == pytest.approx(tables["traces"][0][name], rel=1e-4)
    assert render(again).count('class="chart"') == render(tables).count('class="chart"')
    path.write_text('{"dosa": 1, "kind": "bench"}')
    assert main([str(path)]) == 2


def test_shorter_contexts_keep_the_latest_keys(demo):
    half = list(shorter_contexts(demo))[1]
    kept = dosa.topk(*half, topk=64, method="dense")
    want = dosa.topk(*demo._replace(ks=np.full(128, 16384, np.int32)), topk=64, method="dense")
    np.testing.assert_array_equal(kept.ids + 16384, want.ids)


def test_page_stands_alone_and_trusts_no_name(tables):
    page = render({"traces": [tables["traces"][0] | {"trace": "</script><b>"}], "heads": tables["heads"]})
    assert "</script><b>" not in page and "&lt;/script&gt;" in page
    assert not re.search(r"""(src|href)\s*=\s*["'](https?:)?//""", page)
    assert page.count('class="chart"') == 1 and page.count("What dosa skips") == 2 and "{{title}}" not in page


def test_traces_keep_apart(tmp_path, demo):
    few = demo._replace(q=demo.q[:1], w=demo.w[:1], ke=demo.ke[:1])
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        dosa.save_trace(path, *few, metadata={"layer": "4"})
    mine = tmp_path / "mine.safetensors"
    dosa.save_trace(mine, *few, metadata={"layer": "4", "model": "mix", "domain": "code"})
    lines = tmp_path / "lines.jsonl"
    lines.write_text(2 * BENCH.read_text().splitlines(keepends=True)[0])
    told = measure([*paths, paths[1], mine, lines], topk=64, rows=1)
    name = "layer 4, 32 heads, 32K keys"
    assert [row["trace"] for row in told["traces"]] == [name, f"{name} (b)", f"{name} (2)", f"code, mix, {name}"]
    case = "code-mix-h32-l1-64k, topk 2048"
    assert {row["case"] for row in told["bench"]} == {case, f"{case} (2)"}


def test_numbers_are_saved_without_what_draws_them(tmp_path, demo, monkeypatch):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    trace = tmp_path / "a.safetensors"
    dosa.save_trace(trace, *demo._replace(q=demo.q[:1], w=demo.w[:1], ke=demo.ke[:1]))
    assert main([str(trace), "--rows", "1", "-o", str(tmp_path / "numbers.json")]) == 0
    assert main([str(trace), "-o", str(tmp_path / "report.html")]) == 2


def test_bad_files_are_refused_in_one_line(tmp_path, capsys):
    lines = tmp_path / "x.jsonl"
    for text, what in [("{", "x.jsonl:1: not a line of dosa's JSON"), ('{"kind": "other"}', "nothing to report")]:
        lines.write_text(text)
        assert main([str(lines), "-o", str(tmp_path / "r.html")]) == 2
        assert what in capsys.readouterr().err
    assert main([str(tmp_path / "absent.safetensors")]) == 2
    assert not (tmp_path / "r.html").exists()


def test_bad_options_are_refused_before_anything_is_measured(tmp_path, capsys):
    trace = tmp_path / "a.safetensors"
    trace.write_bytes(b"kept")
    for options, what in [
        (["--rows", "-1"], "--rows is -1; allowed are 0"),
        (["--share", "7"], "--share is 7.0; allowed are 0 to 1"),
        (["--share", "nan"], "--share is nan"),
        (["-o", str(tmp_path / "absent" / "r.html")], "there is no directory"),
        (["-o", str(trace)], "a file that is read"),
    ]:
        assert main([str(trace), *options]) == 2
        assert what in capsys.readouterr().err
    assert trace.read_bytes() == b"kept"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_chart(scheme, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("there is no chromium")
    page_file = tmp_path / "report.html"
    arguments = [TRACES / "demo-h32.safetensors", BENCH, "--rows", "2", "-o", page_file]
    done = subprocess.run([sys.executable, "-m", "dosa.report", *map(str, arguments)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{page_file}\n", "")

    problems = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 900})
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: said.type in ("error", "warning") and problems.append(said.text))
        page.goto(page_file.as_uri())
        page.wait_for_selector("body[data-drawn], body[data-failed]", timeout=60_000)
        assert page.get_attribute("body", "data-drawn") == scheme, page.get_attribute("body", "data-failed")
        charts = page.query_selector_all(".chart")
        assert len(charts) == 10
        for chart in charts:
            name, drawing = chart.get_attribute("id"), chart.query_selector("svg")
            assert drawing is not None, name
            box = drawing.bounding_box()
            assert box["width"] > 500 and box["height"] > 80, name
            marks = "svg .mark-rect.role-mark path, svg .mark-line.role-mark path, svg .mark-symbol.role-mark path"
            shapes = [path for path in chart.query_selector_all(marks) if path.bounding_box()["width"] > 0]
            assert len(shapes) >= {"pruning": 2, "seeds": 2, "whole": 1}.get(name, 3), f"{name} is blank"
            assert "undefined" not in drawing.text_content() and "NaN" not in drawing.text_content(), name
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        screenshot = tmp_path / f"{scheme}.png"
        page.screenshot(path=screenshot, full_page=True)
        browser.close()
    assert problems == [] and screenshot.stat().st_size > 50_000
