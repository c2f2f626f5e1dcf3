"""Ways to survive failures, by name, and the lives of ranks under them."""
