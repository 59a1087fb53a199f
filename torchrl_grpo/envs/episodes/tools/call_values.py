"""Values of arguments that are not written as JSON, and what may be read of them.

The model writes this text, so nothing here runs it, and nothing goes deeper than a bound.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

# Longest text that is read as Python, in characters. Python's own parser has no other bound.
_LONGEST_PYTHON = 20_000
_DEEPEST = 50
_BARE = re.compile(r"[^,}\]]*")
# Templates write such values as Python or as JSON.
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a text without quotes, as the schema of the argument has it.

    Args:
        text: the value as the model wrote it.
        schema: JSON schema of the argument; empty if it is not known.

    Returns:
        The value of the first type that fits other than a text, else the text itself.
    """
    types = set(_types(schema))
    if types == {"string"}:
        return text
    stripped = text.strip()
    try:
        value = _WORDS[stripped] if stripped in _WORDS else json.loads(stripped)
    except (ValueError, RecursionError):
        return text
    if not types:
        return value
    is_bool = isinstance(value, bool)
    fits = any(isinstance(value, _TYPES.get(name, ())) and is_bool == (name == "boolean") for name in types)
    return value if fits else text


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    declared = schema.get("type", ())
    yield from (declared,) if isinstance(declared, str) else declared
    for name in ("anyOf", "oneOf"):
        for choice in schema.get(name, ()):
            yield from _types(choice)
    if schema.get("nullable"):
        yield "null"


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Read calls written in Python, such as ``[add(a=1, b=2), show(text='x')]``.

    Returns:
        The name and the arguments of each.

    Raises:
        ValueError: the text is something else. Nothing of it is run.
    """
    if len(text) > _LONGEST_PYTHON:
        raise ValueError(f"calls may have at most {_LONGEST_PYTHON} characters")
    try:
        calls = []
        for node in _parsed(text.strip()):
            value = node.value if isinstance(node, ast.Expr) else node
            for item in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
                calls.append(_python_call(item))
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return calls


def _parsed(text: str) -> list[ast.stmt]:
    with warnings.catch_warnings():
        # Such as one about a backslash in a string.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text).body
        except SyntaxError:
            # Some templates write line breaks into strings as they are.
            return ast.parse(text.replace("\n", "\\n")).body


def _python_call(node: ast.AST) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("it is no call")
    if node.args or not all(keyword.arg for keyword in node.keywords):
        raise ValueError("every argument needs its name")
    arguments = {
        str(keyword.arg): ast.literal_eval(_Words().visit(keyword.value)) for keyword in node.keywords
    }
    # Bytes, sets and complex numbers are no arguments.
    return ast.unparse(node.func), json.loads(json.dumps(arguments))


class _Words(ast.NodeTransformer):
    """Replaces the words of JSON, which some templates write inside calls in Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def loose_object(text: str, start: int, quote: str) -> tuple[dict[str, Any], int]:
    """Read an object whose keys have no quotes, such as ``{key:<|"|>text<|"|>,count:3}``.

    Args:
        text: text with the object.
        start: position of its brace.
        quote: what stands before and after a text.

    Returns:
        The object, and the position after it.

    Raises:
        ValueError: the text is something else, or too deep.
    """
    value, position = _loose_value(text, start, quote, 0)
    if not isinstance(value, dict):
        raise ValueError("the arguments are no object")
    return value, position


def _loose_value(text: str, position: int, quote: str, depth: int) -> tuple[Any, int]:
    position = _skip(text, position)
    if depth > _DEEPEST:
        raise ValueError("the arguments are too deep")
    if text.startswith(quote, position):
        end = text.index(quote, position + len(quote))
        return text[position + len(quote) : end], end + len(quote)
    if text[position : position + 1] in ("{", "["):
        return _loose_items(text, position, quote, depth)
    if text.startswith('"', position):
        value, position = json.JSONDecoder().raw_decode(text, position)
        return value, position
    match = _BARE.match(text, position)
    word = match[0].strip() if match else ""
    return (_WORDS[word] if word in _WORDS else json.loads(word)), position + len(match[0] if match else "")


def _loose_items(text: str, position: int, quote: str, depth: int) -> tuple[Any, int]:
    is_object = text[position] == "{"
    close, items = "}" if is_object else "]", []
    position = _skip(text, position + 1)
    while not text.startswith(close, position):
        key = ""
        if is_object:
            colon = text.index(":", position)
            key, position = text[position:colon].strip().removeprefix(quote).removesuffix(quote), colon + 1
            key = key.strip('"')
        value, position = _loose_value(text, position, quote, depth + 1)
        items.append((key, value))
        position = _skip(text, position)
        if text.startswith(",", position):
            position = _skip(text, position + 1)
        elif not text.startswith(close, position):
            raise ValueError(f"a comma or {close} is missing")
    return (dict(items) if is_object else [value for _, value in items]), position + 1


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
