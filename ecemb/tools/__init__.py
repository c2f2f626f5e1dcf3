"""The commands of `python -m ecemb`: a module each, with its help, `add` for options and `run` for its work.

`cost` computes what a code costs a job, and the probability that failures exceed the code.
"""
