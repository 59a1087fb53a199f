"""Program that runs the code of the ``python`` tool: it gives up what the code must not have, and runs it.

    python -I -B python_sandbox.py FOLDER SECONDS BYTES < CODE

The code can read and write ``FOLDER`` and read Python's own library. It uses at most ``BYTES`` of memory and
``SECONDS`` of processor time. Where the kernel cannot restrict it, this program says so and ends before it
runs anything.
"""

from __future__ import annotations

import os
import sys
import traceback

# -I leaves this project out of the path, and the code does not need it.
sys.path.insert(0, os.path.abspath(f"{__file__}/../../../../.."))
from torchrl_grpo.runtime import sandbox

del sys.path[0]


def main(folder: str, seconds: int, max_bytes: int) -> None:
    """Restrict this process and run the code on its standard input."""
    code = sys.stdin.buffer.read().decode(errors="replace")
    sandbox.limit(max_bytes, seconds)
    try:
        sandbox.restrict(folder)
    except sandbox.Unavailable as error:
        sys.exit(f"the code was not run: {error}")
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except Exception as error:  # noqa: BLE001  it is shown
        # Without the lines of this program.
        assert error.__traceback__ is not None
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
