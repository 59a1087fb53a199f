"""Slurm: write the batch script of a run, and wait in it for what the run needs."""
