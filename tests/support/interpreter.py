"""Triton's interpreter, made to run under this numpy and to compute in bfloat16 as a GPU does.

It keeps bfloat16 as plain bits: as it stands, it cuts digits off instead of rounding to nearest even, as it does to 8-bit floats,
and its dot multiplies the bits themselves. It rounds twice in a fused multiply-add. It also turns arrays of one number into indices
in a way that numpy no longer allows. And it is slow: whenever a function is called it looks through the whole language for what is
to be replaced, for each operation it makes a table of all types, for each value it describes its shape anew and looks whether its bits
fit, for each argument it asks four times what it is, and each number that meets a block is copied to the block's shape.
"""

from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

assert core is tl.core


def mend() -> None:
    cast, dot, patch_tensor = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot, interpreter._patch_lang_tensor
    float_to_float = InterpreterBuilder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(_narrow(src.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(widen(src.data), tl.float32)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.float8e4nv):
            return TensorHandle(_narrow_to_8(src.data), tl.float8e4nv)
        return float_to_float(self, src, dst_type, rounding)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = TensorHandle(widen(a.data), tl.float32), TensorHandle(widen(b.data), tl.float32)
        return dot(self, a, b, *rest)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return TensorHandle((x.data.astype(np.float64) * y.data + z.data).astype(np.float32), z.dtype)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot
    InterpreterBuilder.create_fma, InterpreterBuilder.create_fp_to_fp = create_fma, create_fp_to_fp
    interpreter._patch_lang_tensor, interpreter._patch_attr = patch_lang_tensor, _patch_attr
    interpreter._patch_lang(mend)  # as in a function that sees all there is of the language, here `tl` and `core`: once is enough
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    numbers, address = cache(interpreter._get_np_dtype), np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda kind: address if kind.scalar.is_ptr() else numbers(kind.scalar)
    _describe_shapes_once()
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None  # computed in 64 bits, and looked at by `debug` alone
    TensorHandle.__post_init__ = lambda self: None
    unwrap, wrapped = core._unwrap_if_constexpr, (list, tuple, core.tuple, core.constexpr)
    core._unwrap_if_constexpr = lambda value: unwrap(value) if isinstance(value, wrapped) else value


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's own, with one call in place of three."""
    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def called(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*arguments, **options)

    scope.set_attr(obj, name, called)


def _describe_shapes_once() -> None:
    """Values of one shape share what describes it, and a number is spread over a shape without a copy.

    What is of the wanted shape and type is left as it is.
    """
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast

    @cache
    def described(shape: tuple[int, ...]) -> tuple[Any, int]:
        return core.tuple(shape), validate_block_shape(shape)

    @cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(prod(shape))

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty, self.sizes = element_ty, sizes
        self.shape, self.numel = described(sizes)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped(type.sizes if type.is_block() else ())

    def spread(value: Any, sizes: tuple[int, ...]) -> Any:
        one = value.handle.data
        handle = TensorHandle(np.ndarray(sizes, one.dtype, one, strides=(0,) * len(sizes)), value.handle.dtype)
        return core.tensor(handle, core.block_type(value.dtype, sizes))

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = (side.type.sizes if side.type.is_block() else None for side in (lhs, rhs))
        if left == right:
            return lhs, rhs
        if left is None or right is None:
            return (spread(lhs, right), rhs) if left is None else (lhs, spread(rhs, left))  # type: ignore[arg-type]
        return broadcast(self, lhs, rhs)

    def cast_to(self: Any, value: Any, kind: Any, *rest: Any) -> Any:
        return value if value.dtype is kind.scalar else cast(self, value, kind, *rest)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    core.block_type.name = property(lambda self: f"<{self.sizes}, {self.element_ty}>")
    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_impl_value, cast_to


def _narrow_to_8(numbers: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def widen(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(numbers: Any) -> Any:
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)
