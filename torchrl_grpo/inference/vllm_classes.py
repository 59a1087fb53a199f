"""Limits vLLM's changes of model classes to vLLM's own model.

For families that it does not implement, vLLM serves the model of transformers and decorates its class in
place. The constructor then requires vLLM's configuration, and a call requires attributes that only this
constructor sets. Every other model of the class in this process would fail, such as the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchrl_grpo.inference import vllm_compat


@contextmanager
def isolate_decorated_classes() -> Iterator[dict[type[nn.Module], type[nn.Module]]]:
    """Let vLLM decorate classes in the block, and undo it at the end.

    Yields:
        Each decorated class, with a subclass that has vLLM's changes; for :func:`assign_decorated_classes`.
    """
    changed: dict[type[nn.Module], type[nn.Module]] = {}
    before: list[tuple[type[nn.Module], tuple[type, ...], dict[str, Any], list[str]]] = []

    def recorded(decorate: Callable[..., type[nn.Module]]) -> Callable[..., type[nn.Module]]:
        def decorate_and_record(cls: type[nn.Module], *args: Any, **options: Any) -> type[nn.Module]:
            # vLLM decorates its own classes once, when it imports them.
            if cls.__module__.startswith("vllm.") or cls in changed:
                return decorate(cls, *args, **options)
            bases, own = cls.__bases__, dict(vars(cls))
            decorated = decorate(cls, *args, **options)
            # Attributes that transformers adds when it builds a model later are not vLLM's.
            changes = {n: value for n, value in vars(cls).items() if n not in own or own[n] is not value}
            before.append((cls, bases, own, list(changes)))
            added = [base for base in cls.__bases__ if base not in bases]
            changed[cls] = type(cls.__name__, (cls, *added), {**changes, "__module__": cls.__module__})
            return decorated

        return decorate_and_record

    try:
        with vllm_compat.decorate_with(recorded):
            yield changed
    finally:
        for cls, bases, own, names in before:
            cls.__bases__ = bases
            for name in names:
                if name in own:
                    setattr(cls, name, own[name])
                else:
                    delattr(cls, name)


def assign_decorated_classes(model: nn.Module, changed: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Assign the subclasses of :func:`isolate_decorated_classes` to the modules of vLLM's ``model`` only."""
    for module in model.modules():
        if type(module) in changed:
            module.__class__ = changed[type(module)]
