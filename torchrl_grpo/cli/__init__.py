"""The command line: reads it, composes the configuration, and starts the jobs."""
