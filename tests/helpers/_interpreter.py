"""Triton's interpreter without work that it repeats or throws away. Results are the same bits.

It replaces the functions of `triton.language` by its own for a launch, and again for every device
function that the launch calls. Once for a launch is enough, and the replacements stay the same.
It computes whether integers overflow and, as it does not debug, drops the answer.
It makes shape and type of each value anew, though there are few different ones.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Without effect for a version of Triton whose interpreter is written in another way."""
    names = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder")
    if all(hasattr(interpreter, name) for name in names):
        _patch_once_per_launch()
        _drop_unused_checks()
        _share_types()


def _patch_once_per_launch() -> None:
    patch = interpreter._patch_lang
    # what kernels see, and what sums, maxima and the like of Triton's own library see
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    patched: dict[tuple[Any, str], Any] = {}

    def patch_again(fn: Any) -> Any:
        if not patched:
            scope = patch(everything)
            patched.update({(o, name): vars(o)[name] for o, name, _ in scope._changes})
            return scope
        scope = interpreter._LangPatchScope()
        for (owner, name), value in patched.items():
            scope.set_attr(owner, name, value)
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = patch_again
    interpreter.InterpretedFunction.__call__ = call


def _drop_unused_checks() -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _share_types() -> None:
    """Types of blocks that are equal share their attributes, and shapes of tensors are theirs."""
    new_block, new_tensor, same = tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__
    same_tuple = tl.tuple.__eq__
    broadcast, numpy_type = TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype
    blocks: dict[tuple[int, ...], dict[str, Any]] = {}  # each holds what its key is the id of

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (id(element_ty), *sizes)
        if key in blocks and all(type(size) is int for size in sizes):
            self.__dict__ = blocks[key]
        else:
            new_block(self, element_ty, shape)
            blocks[key] = vars(self)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).get("_of_tensors")
        if known is None:
            new_tensor(self, handle, type)
            type._of_tensors = (self.numel, self.shape)
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known

    def get_numpy_type(type: Any) -> Any:
        known = vars(type).get("_in_numpy")
        if known is None:
            known = type._in_numpy = numpy_type(type)
        return known

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and [*one.shape] == [*other.shape]:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def equal_shapes(self: Any, other: Any) -> Any:
        if type(other) is list and all(type(size) is int for size in other):
            return tl.constexpr(self.values == other)
        return same_tuple(self, other)

    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor
    tl.tuple.__eq__ = equal_shapes
    tl.dtype.__eq__ = lambda self, other: self is other or same(self, other)
    TritonSemantic.broadcast_impl_value = broadcast_unequal
    interpreter._get_np_dtype = get_numpy_type
