"""The typed configuration and its checks. Imports no torch."""
