"""What the control plane of a run costs as it grows, with engines that answer at once."""
