"""This process and this machine: devices, memory, restrictions, signals and random numbers."""
