"""Comparisons with other libraries. ``make bench`` runs them all."""
