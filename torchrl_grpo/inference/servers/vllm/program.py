"""``python -m torchrl_grpo.inference.servers.vllm.program``: vLLM's server, with vLLM's own arguments."""

from __future__ import annotations

import os
import threading

from torchrl_grpo.inference.servers.lifetime import END_VARIABLE, end_with_stdin
from torchrl_grpo.inference.vllm_compat import run_server


def main() -> None:
    """Run the server until it is ended."""
    if END_VARIABLE in os.environ:
        threading.Thread(target=end_with_stdin, name="end with the run", daemon=True).start()
    run_server()


if __name__ == "__main__":
    main()
