"""Finds out, by reading source and not by running it, which configuration keys a module reads.

A key counts as read where its attribute is loaded from its section: ``cfg.env.num_envs``, or
``env.num_envs`` where ``env`` was assigned from ``<anything>.env`` or annotated ``EnvConfig``. A key
that is only printed with the whole section (``asdict``) does not count, nor does writing to it.
"""

from __future__ import annotations

import ast
import dataclasses
import typing

from torchrl_grpo.config import Config


def _sections(schema: type, prefix: str = "") -> dict[str, str]:
    """Dotted names of the sections, those inside others too, and the names of their types."""
    sections: dict[str, str] = {}
    for name, hint in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            sections |= {prefix + name: hint.__name__, **_sections(hint, f"{prefix}{name}.")}
    return sections


_SECTIONS = _sections(Config)
_ROOTS = {"cfg", "config"}


def read_keys(source: str) -> set[str]:
    """Return the dotted keys that a module's source reads."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    keys = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
            continue
        section = _section(node.value, aliases)
        if section is not None:
            keys.add(f"{section}.{node.attr}")
        elif _last_name(node.value) in _ROOTS:
            keys.add(node.attr)
    return keys


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id.lstrip("_")
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_")
    return None


def _section(node: ast.expr, aliases: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute) and node.attr in _SECTIONS and _last_name(node.value) in _ROOTS:
        return node.attr
    if isinstance(node, ast.Attribute):
        outer = _section(node.value, aliases)
        if outer is not None and f"{outer}.{node.attr}" in _SECTIONS:
            return f"{outer}.{node.attr}"
    if isinstance(node, (ast.Name, ast.Attribute)):
        return aliases.get(ast.unparse(node))
    return None


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Names and ``self.`` attributes that hold a section, for the whole module."""
    by_type = {type_name: section for section, type_name in _SECTIONS.items()}
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            names = {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}
            target = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            for name in names & by_type.keys():
                aliases[target] = by_type[name]
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for _ in range(2):  # an alias of an alias: self._env = env
        for node in assignments:
            for assigned in node.targets:
                pairs = [(assigned, node.value)]
                if isinstance(assigned, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(assigned.elts, node.value.elts, strict=True))
                for left, value in pairs:
                    section = _section(value, aliases)
                    if section is not None:
                        aliases[ast.unparse(left)] = section
    return aliases
