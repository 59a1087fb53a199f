"""Refuse to run text that does more than to build a value.

Judges call ``eval`` on an answer, or on what sympy's parser makes of it: ``Integer(2)*Symbol('x')``. Such
code names functions and calls them. It has no reason to read attributes, to import, to assign, to define
functions, or to call those built-in functions that reach the interpreter. Code that does could change the
judge, and so its own verdict.

Python reports each piece of code to an audit hook before it runs. A judge's library and the code that an
answer has brought are told apart by who calls ``eval``.
"""

from __future__ import annotations

import builtins
import dis
import re
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

# Libraries that evaluate answers. Others compile code of their own, such as that of a named tuple.
_JUDGES = ("reasoning_gym", "sympy", "math_verify", "latex2sympy2_extended")
# Parts of the names of instructions. They exist in Python 3.11 to 3.13.
_FORBIDDEN = ("ATTR", "METHOD", "IMPORT", "MAKE_FUNCTION", "BUILD_CLASS", "STORE_", "DELETE_", "SUPER")
_HARMLESS = {
    "abs", "bool", "complex", "dict", "divmod", "float", "frozenset", "int", "len", "list", "max", "min",
    "pow", "range", "round", "set", "sorted", "str", "sum", "tuple",
}  # fmt: skip
_REACHING = frozenset(vars(builtins)) - _HARMLESS
_NUMBERS = re.compile(r"[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?(?:[ ,\n]+[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?)*+")
# sympy's parser runs this to fill the names that an expression may use.
_OF_PARSER = compile("from sympy import *", "<string>", "exec").co_code


def is_numbers(answer: str) -> bool:
    """Whether an answer is a few short numbers and nothing else: no code, and evaluated in no time."""
    return len(answer) <= 200 and _NUMBERS.fullmatch(answer) is not None


def forbid(refuse: Callable[[], Any]) -> None:
    """Call ``refuse`` when code of an answer is about to run that does more than to build a value.

    Args:
        refuse: function that ends this process. The hook cannot be removed.
    """

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec" and _is_of_answer(arguments[0]) and not builds_a_value(arguments[0]):
            refuse()

    sys.addaudithook(watch)


def _is_of_answer(code: Any) -> bool:
    if not isinstance(code, CodeType) or not _is_text(code):
        return False
    # This function, the hook, and then what called eval or exec.
    caller = sys._getframe(2)
    library = str(caller.f_globals.get("__name__", "")).partition(".")[0]
    return library in _JUDGES or _is_text(caller.f_code)


def _is_text(code: CodeType) -> bool:
    """Whether code comes from a string, and not from the file of a module."""
    return code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen ")


def builds_a_value(code: CodeType) -> bool:
    """Whether code does nothing but name values and call functions that reach nothing."""
    if code.co_code == _OF_PARSER and code.co_names == ("sympy",):
        return True
    if any(name.startswith("_") or name in _REACHING for name in code.co_names):
        return False
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    return not any(part in name for name in names for part in _FORBIDDEN)
