"""Place the roles on devices and predict their memory, before anything heavy is imported."""
