"""When two problems are the same: if they share one of their :func:`keys`. Nothing else decides it.

A problem has several keys: its question, the words of its question with and without what surrounds them in
its data set, what its data set says that makes it the same problem in other words
(:attr:`Example.identity <torchrl_grpo.data.example.Example.identity>`), and the calculation, if the question
asks for nothing but one.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from torchrl_grpo.data.calculation import calculation_in
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.wording import Frame, words

# A longer text is no calculation of a question.
_LONGEST = 1_000
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})


def keys(example: Example, frames: Iterable[Frame] = ()) -> frozenset[str]:
    """Return the keys of a problem. Problems that share a key are the same problem.

    Args:
        example: problem.
        frames: what questions of its source begin and end with. It says nothing about a problem.
    """
    question = question_key(example)
    expression = calculation_in(question)
    calculation = None if expression is None else arithmetic(expression)
    texts = [question, words(question), spaced(example.identity), calculation]
    return frozenset(filter(None, texts + [frame.bare(question) for frame in frames]))


def group_key(example: Example) -> str:
    """Return the key by which wordings of a problem are held out together."""
    return spaced(example.identity) or question_key(example)


def problem_names(examples: Sequence[Example]) -> list[str]:
    """Return a name of each example's problem: the id of the first example that is the same problem."""
    firsts: dict[str, int] = {}
    same = list(range(len(examples)))

    def first_of(number: int) -> int:
        while same[number] != number:
            number = same[number]
        return number

    for number, example in enumerate(examples):
        own = keys(example)
        known = {first_of(firsts[key]) for key in own if key in firsts}
        for other in known:
            same[other] = min(known)
        same[number] = min(known, default=number)
        for key in own:
            firsts.setdefault(key, number)
    return [examples[first_of(number)].id for number in range(len(examples))]


def question_key(example: Example) -> str:
    """Return the question with normalized spacing.

    The question is the whole conversation: conversations that end alike are different problems.
    """
    return spaced(example.question or conversation(example.messages))


def conversation(messages: Sequence[Mapping[str, object]]) -> str:
    """Return a whole conversation as one text; the message itself if it is the only one and the user's."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return str(messages[0]["content"])
    return json.dumps([[message["role"], message["content"]] for message in messages], ensure_ascii=False)


def spaced(text: str) -> str:
    """Return a text with one space between words."""
    return " ".join(text.split())


def number_puzzle(numbers: Iterable[object], target: object) -> str:
    """Return what makes puzzles that combine numbers to a target the same: the numbers, in any order."""
    return f"make {target} of {' '.join(sorted(map(str, numbers)))}"


def arithmetic(expression: str) -> str | None:
    """Return one text for all orders in which a calculation can be written.

    Terms of a sum and factors of a product may change places: ``3 + 4`` and ``4 + 3`` are the same, and so
    are ``4 - 3`` and ``-3 + 4``.

    Args:
        expression: numbers, names and operators.

    Returns:
        The text; None if this is no expression with an operator.
    """
    if len(expression) > _LONGEST:
        return None
    try:
        tree = ast.parse(expression.translate(_SIGNS).replace("^", "**").strip(), mode="eval").body
        has_operator = any(isinstance(node, ast.BinOp) for node in ast.walk(tree))
        return f"calculate {_written(tree)}" if has_operator else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _written(node: ast.expr) -> str:
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()) | ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return f"({' '.join(sorted(_terms(node, '+')))})"
        case ast.BinOp(op=ast.Mult() | ast.Div() | ast.FloorDiv()):
            return f"({' '.join(sorted(_factors(node, '*')))})"
        case ast.BinOp(left, op, right):
            return f"({_written(left)} {type(op).__name__} {_written(right)})"
        case ast.Constant(int() | float() as value):
            return str(Fraction(str(value)))
        case ast.Name(name):
            return name
    raise ValueError("this is no arithmetic")


def _terms(node: ast.expr, sign: str) -> list[str]:
    other = "-" if sign == "+" else "+"
    match node:
        case ast.BinOp(left, ast.Add(), right):
            return _terms(left, sign) + _terms(right, sign)
        case ast.BinOp(left, ast.Sub(), right):
            return _terms(left, sign) + _terms(right, other)
        case ast.UnaryOp(ast.USub(), operand):
            return _terms(operand, other)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _terms(operand, sign)
    return [sign + _written(node)]


def _factors(node: ast.expr, sign: str) -> list[str]:
    other = "/" if sign == "*" else "*"
    match node:
        case ast.BinOp(left, ast.Mult(), right):
            return _factors(left, sign) + _factors(right, sign)
        case ast.BinOp(left, ast.Div() | ast.FloorDiv(), right):
            return _factors(left, sign) + _factors(right, other)
    return [sign + _written(node)]
