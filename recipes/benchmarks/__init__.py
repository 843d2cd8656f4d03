"""Side-by-side benchmarks: each writes one JSON with hardware, commit, versions, command and every round."""
