"""Registers plugins of Hydra that are in this package.

Hydra imports whatever it finds in the package ``hydra_plugins`` at each start, and takes plugins by names in
it only. So ours get such a name when a sweep needs them.
"""

from __future__ import annotations

import sys
from types import ModuleType

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin

MODULE = "hydra_plugins.torchrl_grpo"


def register(kind: str, name: str, plugin: type[Plugin]) -> str:
    """Register a plugin, and return the override that chooses it.

    Args:
        kind: ``launcher`` or ``sweeper``.
        name: name in the group of its kind.
        plugin: the class, whose ``__module__`` is :data:`MODULE`.
    """
    namespace, _, module = MODULE.partition(".")
    known = Plugins.instance()
    if namespace not in sys.modules:
        # No plugin is installed.
        sys.modules[namespace] = ModuleType(namespace)
        sys.modules[namespace].__path__ = []
    ours = vars(sys.modules[namespace]).setdefault(module, ModuleType(MODULE))
    vars(ours)[plugin.__name__] = plugin
    known.register(plugin)
    node = {"_target_": f"{MODULE}.{plugin.__name__}"}
    ConfigStore.instance().store(group=f"hydra/{kind}", name=name, node=node, provider="torchrl_grpo")
    return f"hydra/{kind}={name}"
