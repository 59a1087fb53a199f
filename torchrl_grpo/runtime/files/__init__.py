"""Files and descriptors that others can write, replace or close."""
