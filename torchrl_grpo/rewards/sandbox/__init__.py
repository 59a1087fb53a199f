"""Grading in separate worker processes with time limits."""
