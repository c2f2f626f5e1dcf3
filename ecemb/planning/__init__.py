"""The cost of a code for a job, and the probability that failures exceed it (`cost`)."""
