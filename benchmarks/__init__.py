"""Comparisons with other libraries, side by side in one run. ``make bench`` runs them all."""
