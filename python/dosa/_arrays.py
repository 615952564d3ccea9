"""What differs between array frameworks: making arrays, FP8 views, streams. Everything else goes through DLPack."""

from __future__ import annotations

import importlib
import math
from typing import Any, Callable

import numpy as np

from ._errors import ArgumentError

Array = Any
"""An array of NumPy, PyTorch, JAX, CuPy or whatever else exports DLPack."""

ALIGNMENT = 64
"""Of a workspace and of arrays that are handed to other frameworks, in bytes."""

_CUDA = (2, 13)
_LEGACY_STREAM = 1
"""DLPack's number for CUDA's default stream, whose handle is 0."""


def framework(array: Array) -> str:
    """Name of the package that an array's type comes from: "numpy", "torch", "cupy", "jaxlib", ..."""
    return type(array).__module__.partition(".")[0]


def on_gpu(array: Array) -> bool:
    """Whether an array's memory is a CUDA device's."""
    ask = getattr(array, "__dlpack_device__", None)
    return ask is not None and int(ask()[0]) in _CUDA


def readable(array: Array) -> Array:
    """The same memory in a form that exports DLPack: FP8 as uint8 where a framework cannot export it."""
    kind = framework(array)
    if kind == "torch":
        import torch

        array = array.detach()
        return array.view(torch.uint8) if array.dtype == torch.float8_e4m3fn else array
    if kind == "numpy" and array.dtype.name == "float8_e4m3fn":
        return array.view(np.uint8)
    return array


def exported(array: Array, stream: int) -> Any:
    """What the compiled part takes for an array. On a GPU a DLPack capsule: work on `stream` then sees what the framework
    wrote before, and a framework whose current stream is `stream` has nothing to wait for."""
    if not on_gpu(array):
        return readable(array)
    try:
        return readable(array).__dlpack__(stream=stream or _LEGACY_STREAM)
    except (BufferError, TypeError, RuntimeError) as error:
        raise ArgumentError(f"a {type(array).__name__} of {array.dtype} cannot be exported by DLPack: {error}") from error


def to_host(array: Array) -> np.ndarray:
    """The array in host memory; copied from a GPU."""
    if framework(array) == "cupy":
        return array.get()
    array = readable(array)
    return np.asarray(array.cpu() if on_gpu(array) and framework(array) == "torch" else array)


def host_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised NumPy array whose first element is aligned to ALIGNMENT bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def empty(like: Array, shape: tuple[int, ...], dtype: str) -> tuple[Array, Callable[[], Array]]:
    """An array for results that belong beside `like`, and what turns it into one of `like`'s framework once written."""
    kind = framework(like)
    if kind == "torch":
        import torch

        made = torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    elif kind == "cupy":
        import cupy

        made = cupy.empty(shape, dtype)
    elif kind == "jaxlib" and on_gpu(like):
        import jax

        # Nobody else has this array yet, so that JAX cannot tell when it was written.
        made = jax.block_until_ready(jax.numpy.empty(shape, dtype, device=like.device))
    elif on_gpu(like):
        raise ArgumentError(f"dosa knows no way to make GPU arrays of {kind}; pass out= and workspace=")
    else:
        made = host_empty(shape, dtype)
        if kind != "numpy" and hasattr(like, "__array_namespace__"):
            space = like.__array_namespace__()
            return made, lambda: space.from_dlpack(made)
    return made, lambda: made


def namespace(like: Array) -> Any:
    """The module with `like`'s framework's functions."""
    kind = framework(like)
    return importlib.import_module("jax.numpy" if kind == "jaxlib" else kind if kind in ("torch", "cupy") else "numpy")


def waits(like: Array) -> bool:
    """Whether results must be there when a call returns: JAX orders GPU work by itself and has no stream to work on."""
    return framework(like) == "jaxlib" and on_gpu(like)


def current_stream(like: Array) -> int:
    """The framework's current CUDA stream as a number; 0, the default stream, for host arrays."""
    if not on_gpu(like):
        return 0
    kind = framework(like)
    if kind == "torch":
        import torch

        return int(torch.cuda.current_stream(like.device).cuda_stream)
    if kind == "cupy":
        import cupy

        return int(cupy.cuda.get_current_stream().ptr)
    return 0
