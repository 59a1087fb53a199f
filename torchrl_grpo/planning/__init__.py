"""What runs where and what it needs in memory, decided before anything heavy is imported."""
