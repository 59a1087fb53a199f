"""vLLM's changes of model classes, kept to vLLM's own model.

For families that it has no code of its own for, vLLM serves the model of transformers, and decorates its
class in place: the constructor then asks for vLLM's configuration, and a call for what only that constructor
sets. Every other model of the class in this process, a trainer's or a reference's, would fail by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def apart() -> Iterator[dict[type[nn.Module], type[nn.Module]]]:
    """Let vLLM decorate classes inside; afterwards they are as they were.

    Yields:
        Each class that was decorated, and a subclass of it that has vLLM's changes: for :func:`give`.
    """
    from vllm.compilation import decorators

    changed: dict[type[nn.Module], type[nn.Module]] = {}
    before: list[tuple[type[nn.Module], tuple[type, ...], dict[str, Any], list[str]]] = []
    decorate = decorators._support_torch_compile

    def noted(cls: type[nn.Module], *args: Any, **options: Any) -> type[nn.Module]:
        # Its own classes vLLM decorates when it imports them, once and for good.
        if cls.__module__.startswith("vllm.") or cls in changed:
            return decorate(cls, *args, **options)  # type: ignore[no-any-return]
        bases, own = cls.__bases__, dict(vars(cls))
        decorated: type[nn.Module] = decorate(cls, *args, **options)
        # Not what transformers notes in a class when it builds a model later.
        changes = {n: value for n, value in vars(cls).items() if n not in own or own[n] is not value}
        before.append((cls, bases, own, list(changes)))
        added = [base for base in cls.__bases__ if base not in bases]
        changed[cls] = type(cls.__name__, (cls, *added), {**changes, "__module__": cls.__module__})
        return decorated

    decorators._support_torch_compile = noted
    try:
        yield changed
    finally:
        decorators._support_torch_compile = decorate
        for cls, bases, own, names in before:
            cls.__bases__ = bases
            for name in names:
                if name in own:
                    setattr(cls, name, own[name])
                else:
                    delattr(cls, name)


def give(model: nn.Module, changed: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Let vLLM's own ``model``, and it alone, be of the classes that :func:`apart` has kept."""
    for module in model.modules():
        if type(module) in changed:
            module.__class__ = changed[type(module)]
