"""Episodes of OpenEnv environments, which run in servers of their own."""
