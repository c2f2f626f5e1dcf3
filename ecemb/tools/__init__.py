"""The commands of `ecemb`: a module each, with `add` for options and `run` for its work.

`cost` computes what a code costs a job, and the probability that failures exceed the code.
"""
