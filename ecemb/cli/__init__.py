"""The commands of `python -m ecemb`: a module each, with `add` for its options and `run` for its work."""
