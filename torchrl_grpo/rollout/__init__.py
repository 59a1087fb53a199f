"""Collecting groups of responses, and the replay buffer that hands them to the optimizer."""
