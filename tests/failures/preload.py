"""What the fork server of the failure matrix's workers imports."""

from __future__ import annotations

from failures import worker  # noqa: F401
from forked import end_with_parent

from ecemb import kernels

kernels.get("cpu")  # compiled once, here
end_with_parent()
