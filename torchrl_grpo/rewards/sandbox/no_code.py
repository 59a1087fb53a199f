"""Let judges evaluate values and expressions, and no other code.

Some scorers of ``reasoning_gym`` call ``eval`` on an answer that should be a list. sympy's parser calls it on
what it makes of an answer: ``Integer(2)*Symbol('x')``. Code that does more could change the judge, and so its
own verdict, or read the truth from the judge's variables.

Python reports each piece of code to an audit hook before it runs. An answer's code is told from that of
libraries by who calls ``eval``: sympy runs code that it has written itself, too.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

_PARSER = "sympy.parsing.sympy_parser"
# The parser runs this to fill the names that an expression may use.
_PARSER_IMPORT = compile("from sympy import *", "<string>", "exec")
# What an expression may name, besides the variables of the task.
_NAMES = frozenset({
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Eq", "Ne", "Lt", "Le", "Gt", "Ge",
    "factorial", "sqrt", "cbrt", "root", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "Abs", "abs", "floor",
    "ceiling", "Min", "Max", "pi", "E", "I", "oo",
})  # fmt: skip
# What it may do: load names and constants, call, compute and compare. Python 3.11 to 3.13.
_INSTRUCTIONS = frozenset({
    "RESUME", "CACHE", "NOP", "EXTENDED_ARG", "PUSH_NULL", "POP_TOP", "COPY", "SWAP", "LOAD_NAME",
    "LOAD_CONST", "PRECALL", "CALL", "KW_NAMES", "CALL_KW", "BINARY_OP", "UNARY_NEGATIVE",
    "UNARY_POSITIVE", "CALL_INTRINSIC_1", "COMPARE_OP", "BUILD_TUPLE", "RETURN_VALUE", "RETURN_CONST",
})  # fmt: skip
_NUMBERS = re.compile(r"[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?(?:[ ,\n]+[-+]?[0-9]{1,9}(?:\.[0-9]{1,9})?)*+")


def is_numbers(answer: str) -> bool:
    """Whether an answer is a few short numbers and nothing else: no code, and evaluated in no time."""
    return len(answer) <= 200 and _NUMBERS.fullmatch(answer) is not None


def forbid(refuse: Callable[[], Any]) -> None:
    """Call ``refuse`` when an answer is about to run code that is neither a value nor an expression.

    Args:
        refuse: function that ends this process. The hook cannot be removed.
    """

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        code = arguments[0] if event == "exec" else None
        if not isinstance(code, CodeType) or not _is_text(code):
            return
        # This function, and then what called eval or exec.
        caller = sys._getframe(1)
        module = str(caller.f_globals.get("__name__", ""))
        if _is_text(caller.f_code):
            allowed = False
        elif module == _PARSER:
            allowed = is_expression(code, caller.f_locals.get("local_dict") or {})
        elif module.partition(".")[0] == "reasoning_gym":
            allowed = is_value(code)
        else:
            # A library runs code of its own, such as that of a named tuple.
            allowed = True
        if not allowed:
            refuse()

    sys.addaudithook(watch)


def _is_text(code: CodeType) -> bool:
    """Whether code comes from a string, and not from the file of a module."""
    return code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen ")


def is_value(code: CodeType) -> bool:
    """Whether code is made of literals: it names nothing."""
    return not code.co_names


def is_expression(code: CodeType, variables: Mapping[str, object]) -> bool:
    """Whether code is a mathematical expression as sympy's parser writes it.

    Args:
        code: the code.
        variables: what the judge has told the parser to take for some names. An expression may name the
            symbols among it.
    """
    if code.co_code == _PARSER_IMPORT.co_code and code.co_names == _PARSER_IMPORT.co_names:
        return True
    symbols = {name for name, value in variables.items() if type(value).__name__ in ("Symbol", "Dummy")}
    # The names of the keywords of a call are a constant.
    keywords = [constant for constant in code.co_consts if isinstance(constant, tuple | frozenset)]
    return (
        _NAMES.union(symbols).issuperset(code.co_names)
        and all(names == ("evaluate",) for names in keywords)
        and _INSTRUCTIONS.issuperset(instruction.opname for instruction in dis.get_instructions(code))
    )
