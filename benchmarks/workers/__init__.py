"""One process per library; each takes one step when told to (:mod:`benchmarks.protocol`)."""
