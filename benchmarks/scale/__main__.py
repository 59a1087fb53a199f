"""``python -m benchmarks.scale``: what each part of the control plane costs as a run grows.

Engines, servers and judges are fake. They answer at once, so what is measured is this process; a judge and
two rewards wait on purpose. "gathered" counts all bytes over the loopback device of this machine. All of it
takes minutes on two cores, which must be idle: targets are for a quiet machine. The exit code is 1 if one is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.scale import collection, gathered, rounds, servers
from benchmarks.scale.parts import in_turn, table

PARTS = {**servers.PARTS, **collection.PARTS, **rounds.PARTS, **gathered.PARTS}


def main() -> None:
    """Measure the parts that were named, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="parts:\n" + "\n".join(f"  {name}: {part.title}" for name, part in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to measure; all by default")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - PARTS.keys()):
        parser.error(f"{', '.join(unknown)}: no such part; the parts are {', '.join(PARTS)}")
    parts = {name: PARTS[name] for name in options.parts or PARTS}
    results = in_turn(parts, lambda line: print(line, file=sys.stderr, flush=True))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    missed = [result["name"] for result in results if not result["holds"]]
    print(table(results))
    print(f"missed: {', '.join(missed)}" if missed else "All targets hold.", flush=True)
    # Fake servers and engines have threads that wait for ever.
    os._exit(1 if missed else 0)


if __name__ == "__main__":
    main()
