"""The native library, loaded by ctypes: the structs and functions of `octavo/native/octavo.h`, field by field.

    find_library()    the library of this package, or why there is none: not built, not loadable here, or from another build

The library has no handle: its level, its threads and its buffers belong to the process. So it serves one
caller at a time: threads that call it take turns. A forked child must not call it (threads do not survive a fork).
"""

import ctypes
import functools
import sys
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo import layout

PATH = Path(__file__).parents[2] / "native" / ("liboctavo.dylib" if sys.platform == "darwin" else "liboctavo.so")
PANEL, K_PAD = layout.PANEL, layout.K_PAD
F32, BF16, Q8, Q4, F16 = range(5)  # formats of weights and, except Q4, of caches
NO_MEMORY = -(2**31)  # result of functions that need buffers
ACTIVATIONS = {"swiglu": 0, "geglu": 1, "clamped": 2}


class Matrix(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32), ("group", c_int32), ("n", c_int64), ("k", c_int64), ("data", c_void_p),
        ("scale", c_void_p), ("offset", c_void_p), ("factor", c_float), ("top", c_float), ("bias", c_void_p), ("order", c_void_p),
        ("table", c_void_p),
    ]  # fmt: skip


class Mixture(ctypes.Structure):
    _fields_ = [
        ("count", c_int32), ("chosen", c_int32), ("first", c_int32), ("held", c_int32), ("over_all", c_int32), ("normed", c_int32),
        ("router", Matrix), ("experts_gate_up", Matrix), ("experts_down", Matrix), ("shared_gate_up", Matrix), ("shared_down", Matrix),
        ("shared_gate", Matrix),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p), ("attention_after_norm", c_void_p), ("mlp_after_norm", c_void_p),
        ("q_norm", c_void_p), ("k_norm", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("sinks", c_void_p),
        ("qkv", Matrix), ("output", Matrix), ("gate_up", Matrix), ("down", Matrix), ("mixture", POINTER(Mixture)),
        ("k_cache", c_void_p), ("v_cache", c_void_p), ("k_scale", c_void_p), ("v_scale", c_void_p),
        ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("rotary_dim", c_int32), ("whole_norm", c_int32),
        ("window", c_int32), ("cache_group", c_int32), ("block_size", c_int32), ("activation", c_int32),
        ("attention_scale", c_float), ("soft_cap", c_float), ("residual_scale", c_float),
    ]  # fmt: skip


class Group(ctypes.Structure):
    _fields_ = [("memory", c_void_p), ("slot_bytes", c_int64), ("rank", c_int32), ("size", c_int32), ("timeout_ms", c_int32)]


class Model(ctypes.Structure):
    _fields_ = [
        ("num_layers", c_int32), ("hidden", c_int32), ("vocab", c_int32), ("cache_kind", c_int32), ("embed_kind", c_int32),
        ("eps", c_float), ("embedding_scale", c_float), ("logit_scale", c_float), ("logit_cap", c_float),
        ("layers", POINTER(Layer)), ("embed", c_void_p), ("norm", c_void_p), ("head", Matrix), ("vocab_start", c_int32),
        ("vocab_rows", c_int32), ("group", POINTER(Group)),
    ]  # fmt: skip


class SharedNode(ctypes.Structure):
    """The fields defined in `kernels/shared_keys.py`, which builds arrays of them."""

    _fields_ = [("first", c_int32), ("count", c_int32), ("begin", c_int32), ("end", c_int32)]


class Step(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int32), ("num_rows", c_int32), ("table_width", c_int32), ("num_samples", c_int32),
        ("slot_stride", c_int64), ("context_stride", c_int64), ("table_stride", c_int64),
        ("token_ids", c_void_p), ("positions", c_void_p), ("slots", c_void_p), ("query_start", c_void_p), ("context_len", c_void_p),
        ("tables", c_void_p), ("shared_start", c_void_p), ("shared_nodes", c_void_p), ("shared_rows", c_void_p), ("sample_index", c_void_p),
        ("received", c_void_p), ("passed", c_void_p), ("hidden", c_void_p), ("logits", c_void_p), ("best", c_void_p),
    ]  # fmt: skip


class Draws(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64), ("vocab", c_int64), ("logits", c_void_p), ("temperature", c_void_p), ("top_p", c_void_p), ("min_p", c_void_p),
        ("top_k", c_void_p), ("noise", c_void_p), ("positions", c_void_p), ("ids", c_void_p),
    ]  # fmt: skip


class Ranking(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64), ("vocab", c_int64), ("count", c_int64), ("logits", c_void_p), ("ids", c_void_p), ("chosen", c_void_p),
        ("ranks", c_void_p), ("totals", c_void_p), ("near", c_void_p), ("near_ids", c_void_p),
    ]  # fmt: skip


STRUCTS = (Matrix, Mixture, Layer, Group, Model, SharedNode, Step, Draws, Ranking)
_MATRIX, _MODEL, _STEP, _GROUP = POINTER(Matrix), POINTER(Model), POINTER(Step), POINTER(Group)

# Function name -> (result type, argument types).
FUNCTIONS = {
    "octavo_level_name": (c_char_p, [c_int]),
    "octavo_cpu_level": (c_int, []),
    "octavo_set_level": (None, [c_int]),
    "octavo_level": (c_int, []),
    "octavo_set_threads": (None, [c_int]),
    "octavo_threads": (c_int, []),
    "octavo_step": (c_int, [_MODEL, _STEP]),
    "octavo_group_bytes": (c_int64, [c_int, c_int64]),
    "octavo_reduce": (c_int, [_GROUP, c_void_p, c_int64]),
    "octavo_gather": (c_int, [_GROUP, c_void_p, c_void_p, c_int64]),
    "octavo_abort": (None, [_GROUP]),
    "octavo_matmul": (c_int, [_MATRIX, c_void_p, c_void_p, c_int64, c_int64]),
    "octavo_gate_up": (c_int, [_MATRIX, c_int, c_void_p, c_void_p, c_int64, c_int64]),
    "octavo_mix": (c_int, [POINTER(Mixture), c_int, c_void_p, c_void_p, c_int64]),
    "octavo_add_rms_norm": (c_int, [c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64]),
    "octavo_write": (c_int, [_MODEL, c_int, _STEP, c_void_p]),
    "octavo_attend": (c_int, [_MODEL, c_int, _STEP, c_void_p, c_void_p]),
    "octavo_cap_logits": (c_int, [_MODEL, c_void_p, c_int64]),
    "octavo_draw": (c_int, [POINTER(Draws)]),
    "octavo_rank": (c_int, [POINTER(Ranking)]),
    "octavo_uniform": (None, [c_void_p, c_int64, c_void_p, c_int64]),
    "octavo_pack_float": (None, [_MATRIX, c_void_p, c_void_p]),
    "octavo_pack_codes": (None, [_MATRIX, c_void_p, c_void_p, c_void_p, c_void_p]),
    "octavo_unpack_blocks": (None, [c_int, c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "octavo_halves": (None, [c_void_p, c_int64, c_float, c_void_p]),
    "octavo_block_range": (c_float, [c_int, c_void_p, c_int64]),
    "octavo_pack_blocks": (None, [_MATRIX, c_void_p, c_void_p, c_void_p, c_void_p]),
    "octavo_block_floats": (None, [c_int, c_void_p, c_int64, c_int, c_void_p]),
    "octavo_struct_sizes": (None, [c_void_p]),
}


class NativeLibrary:
    """`library.call.octavo_matmul(...)` is the function of that name; ctypes checks its arguments."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded, AttributeError or ValueError if it is from another build."""
        self.path = path
        self.call = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self.call, name)
            function.restype, function.argtypes = result, arguments
            if result is c_int:
                function.errcheck = _checked
        there = np.zeros(len(STRUCTS), np.int64)
        self.call.octavo_struct_sizes(address(there))
        for struct, size in zip(STRUCTS, there.tolist()):
            if size != ctypes.sizeof(struct):
                raise ValueError(f"{struct.__name__} has {size} bytes there and {ctypes.sizeof(struct)} here")

    @functools.cached_property
    def levels(self) -> tuple[str, ...]:
        """The levels that this machine supports and the compiler of the library could build, in ascending order."""
        return tuple(self.call.octavo_level_name(level).decode() for level in range(self.call.octavo_cpu_level() + 1))

    @property
    def level(self) -> str:
        return self.levels[int(self.call.octavo_level())]

    def set_level(self, level: str) -> None:
        self.call.octavo_set_level(self.levels.index(level))

    @property
    def threads(self) -> int:
        return int(self.call.octavo_threads())

    def set_threads(self, threads: int) -> None:
        """Starts and stops workers; the caller is one of the threads."""
        self.call.octavo_set_threads(threads)


def _checked(code: int, function: object, arguments: object) -> int:
    """Raises MemoryError if a call had no memory for its buffers. Other results are for the caller."""
    if code == NO_MEMORY:
        raise MemoryError("there is no memory for the buffers of the native kernels")
    return code


def address(array: NDArray[np.generic] | None) -> int | None:
    """Returns the address of an array. The caller must keep the array alive."""
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous")
    return array.ctypes.data


@functools.cache
def find_library() -> NativeLibrary | str:
    """Returns the library of this package, or a message with the reason why it cannot be used and what helps."""
    again = "run `make native` in a clone, or install the package again"
    if not PATH.exists():
        return f"{PATH.name} was not built: with a C++20 compiler there (g++ 11 or newer), {again}"
    try:
        return NativeLibrary(PATH)
    except OSError as error:
        return f"{PATH.name} cannot be loaded here ({error}): {again}"
    except (AttributeError, ValueError) as error:
        return f"{PATH.name} is from another build than this package ({error}): {again}"
