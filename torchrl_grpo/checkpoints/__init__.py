"""Run folders and checkpoints: creates, claims, writes, finds and reads them."""
