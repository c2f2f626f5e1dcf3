"""The cost of a code for a job (`cost`), and the probability that failures exceed it (`data_loss`)."""
