"""``python -m torchrl_grpo.slurm`` prints the batch script of a run."""

from torchrl_grpo.slurm.command import main

if __name__ == "__main__":
    raise SystemExit(main())
