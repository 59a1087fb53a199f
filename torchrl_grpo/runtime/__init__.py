"""This process and this machine: devices, memory, signals and random numbers."""
