"""What a run leaves on disk: its folder, its checkpoints, and how they are read back."""
