"""Grading in processes of its own, with time limits."""
