"""Recorded traces hold what the model computed, sampled and bounded."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from conftest import small_problem

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


def test_masks_become_ranges_or_are_refused():
    visible = np.zeros((3, 6), bool)
    visible[0, 2:5], visible[1, :] = True, True
    ks, ke = capture._ranges(visible)
    assert ks.tolist() == [2, 0, 0] and ke.tolist() == [5, 6, 0]
    visible[2, [0, 3]] = True
    with pytest.raises(dosa.ArgumentError, match="several stretches"):
        capture._ranges(visible)


@pytest.fixture(params=["deepseek_v32", "glm_moe_dsa"])
def network(request):
    """A small model with random weights, 2 layers, topk 16, and a way to run it in two chunks."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    name = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(
        vocab_size=100, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=2, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
        index_n_heads=4, index_head_dim=64, index_topk=16, max_position_embeddings=512,
    )  # fmt: skip
    model = getattr(transformers, name + "Model")(config).eval()
    tokens = torch.randint(0, 100, (2, 90))

    def run():
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad():
            return torch.cat([model(part, past_key_values=cache).last_hidden_state for part in tokens.split([60, 30], 1)], 1)

    return model, run


def indexers(model):
    return [module for module in model.modules() if type(module).__name__ in capture.INDEXERS]


def test_a_transformers_model_is_recorded_as_it_runs(network, tmp_path):
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
        assert len(problem.k) == (60, 90)[part] and problem.ke[-1] == (60, 90)[part]
        ids, scores, _ = dosa.topk(*problem, topk=16)
        assert dosa.verify(*problem, ids=ids, scores=scores, rows=None).equal
        theirs = seen[layer][part][sequence].numpy()[recorder.sample(len(seen[layer][part][sequence]))]
        common = [len(set(a) & set(b)) for a, b in zip(ids[-4:], theirs[-4:])]
        assert min(common) >= 12, common  # theirs is not quantised
    with pytest.raises(dosa.ArgumentError, match="Linear holds no indexer"):
        with capture.transformers(torch.nn.Linear(1, 1), tmp_path):
            pass


def test_a_transformers_model_computes_the_same_with_dosas_selection(network, monkeypatch):
    """Bit for bit what it computes with the selection that a full sort of the same FP8 scores gives."""
    import torch

    model, run = network

    def full_sort(problem, topk):
        scores = dosa.scores(*problem)
        ids = np.lexsort((np.broadcast_to(np.arange(scores.shape[1]), scores.shape), -scores))[:, :topk]
        return np.where(np.take_along_axis(scores, ids, 1) == -np.inf, -1, ids).astype(np.int32)

    def outputs(select):
        for module in indexers(model):
            theirs = type(module).forward.__get__(module)

            def forward(*args, module=module, theirs=theirs, **kwargs):
                width = theirs(*args, **kwargs).shape[-1]  # fills the cache too
                given = {**dict(zip(capture._ARGUMENTS, args)), **kwargs}
                ids = torch.from_numpy(np.stack([select(p, width) for p in capture.indexer_problems(module, **given)]))
                return torch.where(ids < 0, ids[..., :1], ids)  # a repeated id is masked in once

            monkeypatch.setattr(module, "forward", forward)
        return run()

    unquantised = run()
    screened = outputs(lambda problem, topk: dosa.topk(*problem, topk=topk, method="dosa").ids)
    assert torch.equal(screened, outputs(full_sort))
    assert not torch.equal(screened, unquantised)  # the selection was replaced
