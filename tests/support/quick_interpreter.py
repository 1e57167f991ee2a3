"""A pytest plugin for processes whose Triton interprets: the same results, several times sooner.

Triton 3.6 wraps its whole language again for every device function that a kernel calls, around the wraps already
there; once for the kernel is enough. It also checks every integer operation for overflow, which compiled kernels do
not.
"""

import dataclasses
import types

import triton.language as tl
from triton.runtime import interpreter

_wrap, _open = interpreter._patch_lang, []
# A function in whose sight is all of the language that kernels and Triton's own library use.
_EVERYTHING = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def _wrap_once(function):
    if _open:
        return None
    scope = _wrap(_EVERYTHING)
    restore = scope.restore
    _open.append(scope)

    def end():
        _open.clear()
        restore()

    scope.restore = end
    return scope


interpreter._patch_lang = _wrap_once
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
