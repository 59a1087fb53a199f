"""Engines and reference models in workers, and how work is divided between them."""
