"""What serving engines call, with what they pass."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from conftest import exact_selection, small_problem

import dosa
from dosa import dropin

# Two requests in one gathered buffer, a row with fewer keys than topk and two padding rows (C1, C9, C10).
PROBLEM = small_problem(9, 6, 200, 4)._replace(
    ks=np.int32([0, 0, 120, 120, 120, 3]), ke=np.int32([100, 120, 125, 200, 119, 3])
)
KV = (PROBLEM.k, PROBLEM.k_scale)
RANGES = (PROBLEM.ks, PROBLEM.ke)


def test_deepgemm_arguments_to_ids():
    got = dropin.fp8_mqa_topk(PROBLEM.q, KV, PROBLEM.w, *RANGES, topk=16)
    np.testing.assert_array_equal(got, exact_selection(PROBLEM, 16, False, False)[0])


def test_vllm_buffer_gets_ids_relative_to_ks_and_nothing_else():
    buffer = np.full((8, 20), 0x7FFFFFFF, np.int32)
    dropin.top_k_per_row_prefill(PROBLEM.q, KV, PROBLEM.w, *RANGES, buffer, topk=16)
    np.testing.assert_array_equal(buffer[:6, :16], exact_selection(PROBLEM, 16, True, True)[0])
    assert (buffer[6:] == 0x7FFFFFFF).all() and (buffer[:, 16:] == 0x7FFFFFFF).all()
    with pytest.raises(dosa.ArgumentError, match=r"topk_indices has shape \[5, 20\]; it must be at least \[6, 16\]"):
        dropin.top_k_per_row_prefill(PROBLEM.q, KV, PROBLEM.w, *RANGES, buffer[:5], topk=16)


def test_sglang_offsets_leave_padding_alone():
    offsets = np.int32([0, 0, 4096, 4096, 4096, 7])
    got = dropin.topk_transform_ragged(PROBLEM.q, KV, PROBLEM.w, *RANGES, offsets, topk=16)
    relative = exact_selection(PROBLEM, 16, False, True)[0]
    np.testing.assert_array_equal(got, np.where(relative < 0, -1, relative + offsets[:, None]))
    assert got.dtype == np.int32 and (got[4:] == -1).all()
    with pytest.raises(dosa.ArgumentError, match=r"topk_indices_offset has shape \[2\]; it must be \[6\]"):
        dropin.topk_transform_ragged(PROBLEM.q, KV, PROBLEM.w, *RANGES, offsets[:2], topk=16)


def test_sglang_page_table_makes_slots_of_ids():
    table = np.random.default_rng(0).permutation(300).astype(np.int32).reshape(2, 150)
    table[0, 120:] = -7  # behind the request's keys
    got = dropin.topk_transform_paged(PROBLEM.q, KV, PROBLEM.w, *RANGES, table, np.int32([0, 2, 5]), topk=16)
    relative = exact_selection(PROBLEM, 16, False, True)[0]
    owner = [0, 0, 1, 1, 1, 1]  # the last row pads
    want = [[-1 if i < 0 else table[request, i] for i in row] for request, row in zip(owner, relative)]
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.int32
    with pytest.raises(dosa.ArgumentError, match=r"have shapes \[2, 150\] and \[2\]"):
        dropin.topk_transform_paged(PROBLEM.q, KV, PROBLEM.w, *RANGES, table, np.int32([0, 2]), topk=16)


def test_drop_ins_keep_to_the_framework_of_their_arrays():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    t = torch.from_numpy
    q, k, scale, w, ks, ke = map(t, PROBLEM)
    table, rows, offsets = torch.arange(300, dtype=torch.int32).view(2, 150), np.int32([0, 2, 6]), np.int32([1, 2, 3, 4, 5, 6])
    slots = dropin.topk_transform_paged(q, (k, scale), w, ks, ke, table, t(rows), topk=16)
    want = dropin.topk_transform_paged(PROBLEM.q, KV, PROBLEM.w, *RANGES, table.numpy(), rows, topk=16)
    assert slots.dtype == torch.int32 and (slots.numpy() == want).all()
    ragged = dropin.topk_transform_ragged(q, (k, scale), w, ks, ke, t(offsets), topk=16)
    want = dropin.topk_transform_ragged(PROBLEM.q, KV, PROBLEM.w, *RANGES, offsets, topk=16)
    assert ragged.dtype == torch.int32 and (ragged.numpy() == want).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "there are 200 keys; screening pays from 4144 on (min_context)"),
        ({"method": "dosa"}, ""),
        ({"min_context": 100}, ""),
        ({"w": PROBLEM.w[:, :2]}, "w has shape [6, 2]; it must be [6, 4]"),
        ({"ids": np.empty((6, 17), np.int32)}, "ids has shape [6, 17]; it must be [6, 16]"),
        ({"memory_budget": 1}, None),
    ],
)
def test_the_gate_has_a_reason(change, reason):
    gate = dropin.eligible(**{**PROBLEM._asdict(), "topk": 16, **change})
    assert gate.reason == reason if reason is not None else gate.reason
    assert bool(gate) == gate.ok == (gate.reason == "")


def test_try_run_selects_or_leaves_it_to_others(caplog):
    ids, scores = np.full((6, 16), 55, np.int32), np.full((6, 16), 55, np.float32)
    caplog.set_level(logging.INFO, "dosa")
    assert not dropin.try_run(*PROBLEM, topk=16, ids=ids)
    assert "dense path: there are 200 keys" in caplog.text and (ids == 55).all()
    assert not dropin.try_run(*PROBLEM, topk=16, ids=ids, scores=scores[:3], method="dosa")
    assert "scores has shape [3, 16]" in caplog.text and (ids == 55).all()
    assert dropin.try_run(*PROBLEM, topk=16, ids=ids, scores=scores, method="dosa")
    assert dosa.verify(*PROBLEM, ids=ids, scores=scores, rows=None).equal
