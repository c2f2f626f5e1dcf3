"""Ways to survive failures, by name, and the lives of ranks under them."""

from datetime import timedelta

JOB_MTBF = timedelta(hours=14)
"""Mean time between failures of the job that methods are compared for, as on CPR's cluster (published)."""
