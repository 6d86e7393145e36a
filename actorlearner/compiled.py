"""Loops that NumPy has no call for, as machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

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
        function: of what Numba knows (its "nopython" mode); it calls no other of these. Its first
            call puts what was compiled in its place in its module: to come by here takes longer
            than many of them do.
    """

    @cache
    def jitted() -> Callable[Arguments, Result]:
        from numba import njit

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
