"""Triton's interpreter without the work that it repeats at every call of a device function.

It replaces the functions of `triton.language` by its own for a launch, and again for every device
function that the launch calls, which took almost half of its time. Once for a launch is enough.
"""

from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    """Without effect for a version of Triton whose interpreter is written in another way."""
    patch = getattr(interpreter, "_patch_lang", None)
    function = getattr(interpreter, "InterpretedFunction", None)
    if patch is None or not hasattr(function, "rewrite"):
        return
    # what kernels see, and what sums, maxima and the like of Triton's own library see
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: patch(everything)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    function.__call__ = call
