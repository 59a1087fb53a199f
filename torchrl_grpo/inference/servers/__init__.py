"""Engines behind HTTP: vLLM servers that a run starts, or that somebody else has started."""
