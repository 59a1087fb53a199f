"""Rewards that another model gives behind an endpoint: ``reward.functions={NAME: judge}``."""
