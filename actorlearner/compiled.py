"""Loops that NumPy has no call for, as machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``function``, of arrays and numbers, compiled by Numba when it is first called.

    Numba is loaded then, not before: workers call none of these and do without its memory. The
    code is kept beside the module or in the user's cache directory, so that one process compiles
    for all; where neither can be written to, each compiles anew. Arithmetic is IEEE's, in the order
    in which it is written.

    Example::

        @compiled
        def dot(a, b):
            total = 0.0
            for i in range(len(a)):
                total += a[i] * b[i]
            return total

    Args:
        function: of what Numba knows (its "nopython" mode), and `copy_bytes`; it calls no other of
            these. Its first call puts what was compiled in its place in its module: to come by here
            takes longer than many of them do.
    """

    @cache
    def jitted() -> Callable[Arguments, Result]:
        from numba import njit

        _teach_to_copy()
        try:
            call: Callable[Arguments, Result] = njit(cache=True, error_model="numpy")(function)
        except RuntimeError:  # there is no place for its cache
            call = njit(error_model="numpy")(function)
        module = function.__globals__
        if module.get(function.__name__) is first_call:
            module[function.__name__] = call
        return call

    @wraps(function)
    def first_call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return jitted()(*args, **kwargs)

    return first_call


def copy_bytes(
    into: NDArray[np.uint8], at: int, source: NDArray[np.uint8], begin: int, count: int
) -> None:
    """Copy ``source[begin : begin + count]`` to ``into[at : at + count]``.

    In `compiled` functions that is the C library's ``memcpy``. A loop takes up to twice as long: it
    fetches each cache line that it is about to overwrite.

    Args:
        into: contiguous, like ``source``, with which it must not overlap.
        at: where to.
        source: of the bytes.
        begin: where from; neither place is checked.
        count: how many bytes.

    What is compiled with it is kept for as long as the file of its caller does not change.
    """
    into[at : at + count] = source[begin : begin + count]


@cache
def _teach_to_copy() -> None:
    """Let Numba know `copy_bytes`."""
    from numba import types
    from numba.core.cgutils import raw_memcpy
    from numba.extending import intrinsic, overload

    @intrinsic
    def memcpy(typing: Any, into: Any, at: Any, source: Any, begin: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def place(array: Any, at: Any) -> Any:
                array_of = context.make_array(signature.args[array])
                return builder.gep(array_of(context, builder, arguments[array]).data, [at])

            to_bytes, of_bytes = place(0, arguments[1]), place(2, arguments[3])
            count = arguments[4]
            raw_memcpy(builder, to_bytes, of_bytes, count, 1)  # type: ignore[no-untyped-call]
            return context.get_dummy_value()

        return types.void(into, types.intp, source, types.intp, types.intp), generate

    @overload(copy_bytes, strict=False)  # the names alone must agree, not the annotations
    def implement(into: Any, at: Any, source: Any, begin: Any, count: Any) -> Any:
        def are_bytes(array: Any) -> bool:
            return (array.dtype, array.ndim, array.layout) == (types.uint8, 1, "C")

        if not (are_bytes(into) and into.mutable and are_bytes(source)):
            return None

        def call(into: Any, at: Any, source: Any, begin: Any, count: Any) -> None:
            memcpy(into, at, source, begin, count)  # type: ignore[call-arg]

        return call
