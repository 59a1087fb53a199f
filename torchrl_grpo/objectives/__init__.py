"""Group advantages, surrogate objectives, KL estimators and the policy-gradient loss."""
