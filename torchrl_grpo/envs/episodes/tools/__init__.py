"""Tools that a model may call: the built-in ones, and the form of a call."""
