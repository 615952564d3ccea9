"""Recorded traces hold what the model computed, sampled and bounded."""

from __future__ import annotations

import importlib.util
import logging

import numpy as np
import pytest
from conftest import ROOT, small_problem

import dosa
from dosa import capture, prepare

PROBLEM = small_problem(2, 10, 300, 4)._replace(ke=np.arange(291, 301, dtype=np.int32))


def test_rows_are_sampled_and_the_rest_is_kept(tmp_path):
    recorder = capture.Recorder(tmp_path / "new", queries=3, min_keys=0, metadata={"domain": "code"})
    path = recorder.record(5, *PROBLEM)
    problem, metadata = dosa.load_trace(path)
    assert metadata == {"domain": "code", "layer": "5", "call": "0"} and recorder.paths == [path]
    rows = recorder.sample(10)
    assert len(rows) == 3 and rows[-1] == 9 and (np.diff(rows) > 0).all()
    for name in ("q", "w", "ke"):
        np.testing.assert_array_equal(getattr(problem, name), getattr(PROBLEM, name)[rows])
    np.testing.assert_array_equal(problem.k, PROBLEM.k)
    np.testing.assert_array_equal(dosa.topk(*problem, topk=9).ids, dosa.topk(*PROBLEM, topk=9).ids[rows])


def test_what_is_not_wanted_or_has_no_room_is_left_out(tmp_path, caplog):
    size = sum(array.nbytes for array in PROBLEM if array is not None)
    recorder = capture.Recorder(tmp_path, layers={1}, min_keys=300, max_bytes=2 * size)
    assert recorder.record(0, *PROBLEM) is None
    assert recorder.record(1, *PROBLEM._replace(k=PROBLEM.k[:299], k_scale=PROBLEM.k_scale[:299])) is None
    assert recorder.record(1, *PROBLEM) and recorder.record(1, *PROBLEM)
    assert recorder.record(1, *PROBLEM) is None and recorder.record(1, *PROBLEM) is None
    assert [path.name for path in recorder.paths] == ["layer-1-call-0.safetensors", "layer-1-call-1.safetensors"]
    assert caplog.text.count("capture stops") == 1
    with pytest.raises(dosa.ArgumentError, match="queries is 0"):
        capture.Recorder(tmp_path, queries=0)


def test_a_second_recorder_keeps_what_the_first_wrote(tmp_path):
    for _ in range(2):
        recorder = capture.Recorder(tmp_path, min_keys=0)
        assert recorder.record(1, *PROBLEM) and recorder.record(1, *PROBLEM)
    assert [path.name for path in recorder.paths] == ["layer-1-call-2.safetensors", "layer-1-call-3.safetensors"]
    assert dosa.load_trace(recorder.paths[0]).metadata["call"] == "2" and len(list(tmp_path.iterdir())) == 4


def test_masks_become_ranges_or_are_refused():
    visible = np.zeros((3, 6), bool)
    visible[0, 2:5], visible[1, :] = True, True
    ks, ke = capture._ranges(visible)
    assert ks.tolist() == [2, 0, 0] and ke.tolist() == [5, 6, 0]
    visible[2, [0, 3]] = True
    with pytest.raises(dosa.ArgumentError, match="several stretches"):
        capture._ranges(visible)


@pytest.fixture(scope="module")
def example():
    """examples/transformers_selection.py"""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "transformers_selection.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    (reason,) = [backend["reason"] for backend in dosa.info()["backends"] if backend["name"] == request.param]
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=["DeepseekV32", "GlmMoeDsa"])
def network(request, example, device):
    """A small model with random weights, and a way to run it."""
    return example.small_model(request.param, device)


def indexers(model):
    return [module for module in model.modules() if type(module).__name__ in capture.INDEXERS]


def test_a_transformers_model_is_recorded_as_it_runs(network, tmp_path, caplog):
    import torch

    model, run = network
    want, seen = run(), {}
    with capture.transformers(model, tmp_path, min_keys=0, queries=8) as recorder:
        for module in indexers(model):
            module.register_forward_hook(lambda m, a, o: seen.setdefault(m.layer_idx, []).append(o))
        assert torch.equal(run(), want)
    run()
    assert len(recorder.paths) == 8  # layers x chunks x sequences; nothing after the context
    for path in recorder.paths:
        problem, metadata = dosa.load_trace(path)
        layer, call = int(metadata["layer"]), int(metadata["call"])
        part, sequence = divmod(call, 2)
        assert len(problem.k) == (150, 200)[part] and problem.ke[-1] == (150, 200)[part]
        arrays = [None if a is None else torch.from_numpy(a.copy()).to(want.device) for a in problem]
        ids, scores, _ = dosa.topk(*arrays, topk=32)
        assert dosa.verify(*arrays, ids=ids, scores=scores, rows=None).equal
        theirs = seen[layer][part][sequence].cpu().numpy()[recorder.sample(len(seen[layer][part][sequence]))]
        common = [len(set(a) & set(b)) for a, b in zip(ids.tolist()[-4:], theirs[-4:])]
        assert min(common) >= 24, common  # theirs is not quantised
    assert "nothing was captured" not in caplog.text
    with capture.transformers(model, tmp_path, layers={1}) as recorder:
        run()
    assert recorder.paths == [] and "no call of layers [1] saw 4096 keys" in caplog.text
    with pytest.raises(dosa.ArgumentError, match="Linear holds no indexer"):
        with capture.transformers(torch.nn.Linear(1, 1), tmp_path):
            pass


def test_a_transformers_model_computes_the_same_with_dosas_selection(example, device, network):
    """Bit for bit what it computes with the selection that a full sort of the same FP8 inputs' scores gives."""
    import torch

    model, run = network
    unquantised = run()
    with example.selecting(model, example.by_full_sort(device)):
        dense = run()
    with example.selecting(model, example.by_dosa(device)) as shared:
        screened = run()
    assert torch.equal(screened, dense)
    assert not torch.equal(screened, unquantised)  # the selection was replaced
    assert 0.85 < np.mean(shared) < 1 and len(shared) == 2 * 2 * (200 - 31)
    assert torch.equal(run(), unquantised)
