"""``python -m benchmarks.evidence [NAME ...]``: run experiments, keep their records, and write the pages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.evidence import page, picture, records
from benchmarks.evidence.experiments import EXPERIMENTS
from benchmarks.learning import first_model, folders_of, run_stages


def main() -> None:
    """Run each experiment seed by seed. Runs that are in the folder already are not repeated."""
    claims = "\n".join(f"  {name}: {each.claim}" for name, each in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"claims:\n{claims}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--folder", type=Path, help="folder for the runs")
    parser.add_argument("--seed", type=int, help="the only seed to run")
    parser.add_argument("--arm", help="the only arm to run")
    parser.add_argument("--data", help="local copy of the data set, in place of the one of the hub")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in EXPERIMENTS]:
        parser.error(f"NAME={unknown[0]}: there is no such experiment; write one of {', '.join(EXPERIMENTS)}")
    for name in args.names:
        arms = EXPERIMENTS[name].arms
        if args.arm is not None and args.arm not in arms:
            parser.error(f"--arm={args.arm}: {name} has no such arm; write one of {', '.join(arms)}")
        # Another seed would join the published means.
        if args.seed not in (None, *EXPERIMENTS[name].all_seeds):
            known = ", ".join(map(str, EXPERIMENTS[name].all_seeds))
            parser.error(f"--seed={args.seed}: {name} has no such seed; write one of {known}")
    if args.names and args.folder is None:
        parser.error("--folder: it is missing; write the folder for the runs")
    for name in args.names:
        experiment = EXPERIMENTS[name]
        data = () if args.data is None else (f"{experiment.data_key}={args.data}",)
        for seed in experiment.all_seeds if args.seed is None else [args.seed]:
            folder = args.folder.resolve() / name
            model = first_model(experiment.arms, seed, folder)
            # All arms begin with the model that the first one evaluates.
            (base, *_) = folders_of(next(iter(experiment.arms.values())), experiment.arms, seed, folder)
            for arm, stages in experiment.arms.items():
                # Without the run that evaluates the first model, no record could be made of another arm.
                is_selected = args.arm in (None, arm)
                if is_selected or (arm == next(iter(experiment.arms)) and not base.is_dir()):
                    runs = folders_of(stages, experiment.arms, seed, folder)
                    words = (*data, *(experiment.once if seed == 0 and runs[-1] == base else ()))
                    run_stages(stages, seed, runs, words, model)
                    _keep(name, records.read_record(experiment, arm, seed, runs, base), replace=is_selected)
                    if experiment.keeps_samples:
                        records.save_responses(name, runs)
    _write_page()


def _keep(name: str, record: dict[str, Any], replace: bool) -> None:
    known = {(row["arm"], row["seed"]): row for row in records.load(name)}
    key = record["arm"], record["seed"]
    if key in known:
        sys.stdout.write(records.compared(name, known[key], record))
    if replace or key not in known:
        known[key] = record
    try:
        records.save(name, [known[key] for key in sorted(known, key=str)])
    except ValueError as error:
        sys.exit(str(error))


def _write_page() -> None:
    present = {name: records.load(name) for name in EXPERIMENTS}
    for path, (head, experiments, summarized) in page.PAGES.items():
        path.write_text(page.page(head, experiments, present, summarized))
    for name, rows in present.items():
        if rows:
            picture.draw(name, EXPERIMENTS[name], rows, page.PICTURES)
    if sampled := present[page.SAMPLED]:
        page.README.write_text(page.with_samples(page.README.read_text(), sampled))
    sys.stdout.write(f"written to {' and '.join(map(str, page.PAGES))}\n")


if __name__ == "__main__":
    main()
