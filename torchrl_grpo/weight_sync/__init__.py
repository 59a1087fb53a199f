"""Sends the trainer's weights to the engines and verifies that they arrived."""
