"""Read rows from files, the hub and functions, and values from their columns."""
