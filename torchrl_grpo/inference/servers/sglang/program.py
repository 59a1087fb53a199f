"""SGLang's server, with SGLang's own arguments and ``--uds``. It is started by its path.

It runs in SGLang's own environment. It is a file and no module of an installed package there, so that nothing
else of this project's environment is ever imported. SGLang's processes run this file again when they start.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
from functools import partial
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[3]


def _import_this_project() -> None:
    """Make ``torchrl_grpo`` importable, and nothing that lies beside it."""
    if "torchrl_grpo" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "torchrl_grpo", _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["torchrl_grpo"] = package
    spec.loader.exec_module(package)


def main() -> None:
    """Run the server until it is ended."""
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from torchrl_grpo.config.values import SGLANG_KEY_VARIABLE
    from torchrl_grpo.inference.servers.lifetime import END_VARIABLE, end_with_stdin
    from torchrl_grpo.inference.servers.require_key import RequireKey

    if END_VARIABLE in os.environ:
        threading.Thread(target=end_with_stdin, name="end with the run", daemon=True).start()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--uds", default=None)
    ours, theirs = parser.parse_known_args()
    # SGLang's own check leaves some routes open, and has the key on the command line.
    http_server.app.add_middleware(RequireKey, variable=SGLANG_KEY_VARIABLE)
    # It would ask this server over TCP and without the key.
    http_server._freeze_gc_after_server_warmup = lambda *arguments: None
    if ours.uds is not None:
        # SGLang has no argument for a socket file, and its server has.
        uvicorn = http_server.uvicorn
        uvicorn.Config = partial(uvicorn.Config, uds=ours.uds)
    load_plugins()
    try:
        run_server(prepare_server_args(theirs))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    _import_this_project()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from torchrl_grpo.inference.servers.sglang import seeds

        seeds.register()
if __name__ == "__main__":
    main()
