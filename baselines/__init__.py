"""What other people do to survive failures: each method built from its paper, for comparison.

Full and differential checkpoints, partial recovery and asynchronous tiers will live here, a module
for each method. They stand on the public names of ecemb alone, as a user's own code would, and
ecemb knows nothing of them.
"""
