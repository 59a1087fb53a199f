"""Hands the trainer's weights to the engines and proves that they arrived."""
