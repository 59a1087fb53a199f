"""Manages run folders, and writes, finds and reads checkpoints."""
