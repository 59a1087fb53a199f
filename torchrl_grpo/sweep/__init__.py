"""Sweeps: trials on free devices, and what their results say about the settings that were compared."""
