"""vLLM servers. ``program``, ``extension`` and ``older_routes`` run in a process of vLLM."""
