"""Engines behind HTTP: servers of vLLM or SGLang that a run starts, or that somebody else has started."""
