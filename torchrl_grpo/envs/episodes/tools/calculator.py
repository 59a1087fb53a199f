"""A calculator that evaluates arithmetic without running code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_grpo.envs.episodes.tools.tool import Tool, make_schema

_Number = int | float

# Larger results would take long to compute or to print.
_MOST_BITS = 4_096
_MOST_CHARACTERS = 500

_OPERATORS: dict[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: The expression, for example "(3 + 4) * 2.5". It may use + - * / // % ** and brackets.
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"the expression has more than {_MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(
            expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/"), mode="eval"
        )
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    value = evaluate(tree.body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def evaluate(node: ast.expr) -> _Number:
    """Return the value of an arithmetic expression.

    Raises:
        ValueError: it has something else than numbers, operators and brackets, or its value is too large.
        ZeroDivisionError: it divides by zero.
    """
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and type(node.value) is not bool
    ):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = evaluate(node.left), evaluate(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if type(node.op) in _OPERATORS:
            try:
                return _bounded(_OPERATORS[type(node.op)](left, right))
            except OverflowError as error:
                raise ValueError("the result is too large") from error
    raise ValueError(
        f"{ast.unparse(node)!r} is no arithmetic: only numbers, + - * / // % ** and brackets are"
    )


def _power(base: _Number, exponent: _Number) -> _Number:
    # The size is known before the power is computed.
    if isinstance(base, int) and abs(base).bit_length() * abs(exponent) > _MOST_BITS:
        raise ValueError("the result is too large")
    try:
        value: object = base**exponent
    except OverflowError as error:
        raise ValueError("the result is too large") from error
    if not isinstance(value, int | float):
        raise ValueError("the result is not a real number")
    return value


def _bounded(value: _Number) -> _Number:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is not finite")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("the result is too large")
    return value


def build() -> Tool:
    """Return the tool."""

    def run(arguments: Mapping[str, Any], limit_s: float) -> str:
        return calculator(str(arguments["expression"]))

    return Tool("calculator", "calculator", make_schema(calculator, "calculator"), run, is_quick=True)
