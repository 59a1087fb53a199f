"""Group advantages, KL estimators and the clipped loss."""
