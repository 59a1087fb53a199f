"""SGLang servers. ``program``, ``loader``, ``weights`` and ``seeds`` run in SGLang's own environment."""
