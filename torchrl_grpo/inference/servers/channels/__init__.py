"""Ways in which weights go from the trainer's GPU to those of servers, without the host's memory."""
