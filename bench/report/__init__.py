"""Pages and figures from bench/results."""
