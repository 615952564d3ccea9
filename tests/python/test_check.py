"""The checker must find what is wrong, and explain must keep its promises."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import TRACES, exact_scores, small_problem

import dosa


@pytest.fixture
def selected():
    problem = small_problem(3, 3, 120, 4)._replace(ks=np.int32([0, 5, 10]), ke=np.int32([120, 100, 20]))
    problem.k[:], problem.k_scale[:] = np.tile(problem.k[:40], (3, 1)), np.tile(problem.k_scale[:40], 3)  # ties at rank 16
    return problem, *dosa.topk(*problem, topk=16)[:2]


def test_scores_are_exact_and_cover_the_visible_keys(selected):
    problem = selected[0]
    got = dosa.scores(*problem)
    want = exact_scores(problem)
    seen = np.arange(120) >= problem.ks[:, None]
    seen &= np.arange(120) < problem.ke[:, None]
    np.testing.assert_array_equal(got, np.where(seen, want, -np.inf))
    np.testing.assert_array_equal(dosa.scores(*problem, rows=[2, 0]), got[[2, 0]])
    np.testing.assert_array_equal(dosa.scores(*problem, reference="sm90"), got)  # exact sums have one value


@pytest.mark.parametrize(
    ("spoil", "rows", "what"),
    [
        (lambda ids, s: ids.__setitem__((0, 3), ids[0, 2]), None, "row 0, slot 3"),
        (lambda ids, s: ids.__setitem__((1, slice(None)), ids[1, ::-1].copy()), None, "row 1, slot 0"),
        (lambda ids, s: s.__setitem__((1, 15), np.nextafter(s[1, 15], np.float32(9))), None, "row 1, slot 15"),
        (lambda ids, s: ids.__setitem__((2, 12), 12), None, "row 2, slot 12"),
        (lambda ids, s: ids.__setitem__((2, 3), -1), [2], "row 2, slot 3"),
    ],
)
def test_verify_finds_one_wrong_slot(selected, spoil, rows, what):
    problem, ids, scores = selected
    assert dosa.verify(*problem, ids=ids, scores=scores, rows=None).equal
    spoil(ids, scores)
    found = dosa.verify(*problem, ids=ids, scores=scores, rows=rows)
    assert not found.equal and len(found.differences) == 1 and found.differences[0].startswith(what)


def test_verify_takes_any_of_equal_keys_where_asked_to(selected):
    problem, ids, scores = selected
    all_scores = exact_scores(problem)
    worst = scores[0, 15]
    others = np.setdiff1d(np.flatnonzero(all_scores[0] == worst), ids[0])
    assert len(others) > 0
    ids[0, 15] = others[-1]
    assert not dosa.verify(*problem, ids=ids, rows=None).equal
    assert dosa.verify(*problem, ids=ids, rows=None, ties="any").equal
    for wrong, what in [
        (np.flatnonzero(all_scores[0] < worst)[0], "not the best"),
        (ids[0, 0], "repeated"),
        (-1, "valid ids"),
        (120, "outside"),
    ]:
        ids[0, 15] = wrong
        assert what in dosa.verify(*problem, ids=ids, rows=None, ties="any").differences[0]


def test_verify_takes_ids_in_any_order_where_asked_to(selected):
    problem, ids, scores = selected
    shuffled = ids.copy()
    shuffled[:2] = ids[:2, np.random.default_rng(0).permutation(16)]
    assert dosa.verify(*problem, ids=shuffled, rows=None, order="any").equal
    assert not dosa.verify(*problem, ids=shuffled, rows=None).equal


def test_explain_is_complete_and_its_audit_passes(demo):
    told = dosa.explain(*demo, topk=256, rows=[3, 100], rounds=1, audit=True)
    assert [row["row"] for row in told["rows"]] == [3, 100]
    assert told["audit"]["passed"] and told["audit"]["keys"] > 1000 and told["audit"]["rejections"] > 1000
    assert 0 < told["predicted_work"] < 1 and told["dense_seconds"] > 0
    assert told["stats"] == json.loads(dosa.topk(*demo, topk=256).stats.json()) | {
        "thread_seconds": told["stats"]["thread_seconds"]
    }
    with pytest.raises(dosa.ArgumentError, match="method"):
        dosa.explain(*demo, method="dense")


def test_traces_survive_a_round_trip(tmp_path, selected):
    problem = selected[0]
    path = tmp_path / "t.safetensors"
    dosa.save_trace(path, *problem, metadata={"layer": "4"})
    back = dosa.load_trace(path)
    assert back.metadata == {"layer": "4"}
    for name in problem._fields:
        np.testing.assert_array_equal(getattr(back.problem, name), getattr(problem, name), strict=True)
    from safetensors import deserialize

    stored = dict(deserialize(path.read_bytes()))
    assert stored["q"]["dtype"] == "F8_E4M3" and bytes(stored["k_scale"]["data"]) == problem.k_scale.tobytes()


def test_files_that_are_no_traces_are_refused(tmp_path):
    bad = tmp_path / "bad"
    bad.write_bytes(b"no")
    for path in (bad, tmp_path / "absent"):
        with pytest.raises(dosa.FileError, match=path.name):
            dosa.load_trace(path)


def test_traces_with_keys_in_pages_are_refused_by_name(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "paged.safetensors"
    save_file(
        {
            "kv_cache": np.zeros((2, 64, 1, 132), np.uint8),
            "block_table": np.array([[0, 1]], np.int32),
            "context_lens": np.array([[[100]]], np.int32),
            "q": np.zeros((1, 1, 1, 2, 128), np.uint8),
            "w": np.ones((1, 1, 1, 2), np.float32),
        },
        path,
    )
    with pytest.raises(dosa.FileError, match="in pages"):
        dosa.load_trace(path)


def test_the_program_comes_with_the_package():
    program = pathlib.Path(sys.executable).parent / "dosa"
    if not program.exists():
        pytest.skip("the package is imported from a source tree, not installed")
    printed = subprocess.run([program, "info", "--json"], capture_output=True, text=True, check=True).stdout
    told = json.loads(printed)
    assert {name: told[name] for name in dosa.info()} == dosa.info()
    package = pathlib.Path(dosa.__file__).parent
    assert (package / "py.typed").exists() and "class Indexer" in (package / "_core.pyi").read_text()
    subprocess.run([program, "select", TRACES / "demo-h64.safetensors"], capture_output=True, check=True)
