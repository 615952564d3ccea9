"""Arrays of other frameworks go in and come out, without a copy of the inputs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from conftest import small_problem

import dosa

PROBLEM = small_problem(5, 3, 90, 4)._replace(ks=np.int32([0, 2, 4]), ke=np.int32([90, 50, 6]))
WANT = dosa.topk(*PROBLEM, topk=12)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ml_dtypes.float8_e4m3fn])
def test_numpy_fp8_under_any_name(dtype):
    got = dosa.topk(PROBLEM.q.view(dtype), PROBLEM.k.view(dtype), *PROBLEM[2:], topk=12)
    np.testing.assert_array_equal(got.ids, WANT.ids)


def test_array_api_strict():
    xp = pytest.importorskip("array_api_strict")
    got = dosa.topk(*(xp.asarray(array) for array in PROBLEM), topk=12)
    assert isinstance(got.ids, type(xp.asarray(0))) and got.ids.dtype == xp.int32
    np.testing.assert_array_equal(np.from_dlpack(got.ids), WANT.ids)
    np.testing.assert_array_equal(np.from_dlpack(got.scores), WANT.scores)


def test_jax():
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    arrays = [jnp.asarray(array) for array in PROBLEM]
    got = dosa.topk(*arrays, topk=12)
    assert type(got.ids) is type(arrays[0])
    np.testing.assert_array_equal(got.ids, WANT.ids)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def tensors(torch):
    made = [torch.from_numpy(array.copy()) for array in PROBLEM]
    return [made[0].view(torch.float8_e4m3fn), made[1].view(torch.float8_e4m3fn), *made[2:]]


def test_torch_fp8_in_and_tensors_out(torch, tensors):
    tensors[3].requires_grad_()
    got = dosa.topk(*tensors, topk=12)
    assert got.ids.dtype == torch.int32 and got.scores.dtype == torch.float32
    np.testing.assert_array_equal(got.ids, WANT.ids)
    assert got.scores.numpy().tobytes() == WANT.scores.tobytes()


def test_torch_operator_compiles(torch, tensors):
    import dosa.torch_op  # noqa: F401

    as_bytes = [tensors[0].view(torch.uint8), tensors[1].view(torch.uint8), *tensors[2:]]
    torch.library.opcheck(torch.ops.dosa.topk.default, (*as_bytes, 12), {"order": "ascending"})
    compiled = torch.compile(lambda *a: torch.ops.dosa.topk(*a, 12)[0] + 1, backend="aot_eager", fullgraph=True)
    np.testing.assert_array_equal(compiled(*tensors), WANT.ids + 1)
