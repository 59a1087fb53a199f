"""Engines and reference models in Ray workers, and how work is divided between them."""
