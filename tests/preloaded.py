"""What tests' processes need, imported and compiled once: in the fork server that they all come from."""

# ruff: noqa: F401
from __future__ import annotations

import os

os.environ["NUMBA_NUM_THREADS"] = "1"  # threads would not be there in what is forked, though numba thinks so

import galois
import holders
import hypothesis
import pytest
import torch._dynamo  # torch's optimizers import it when they are made
import torch.distributed.checkpoint
import torch.distributed.optim

import ecemb
from ecemb import kernels
from ecemb.code import POLYNOMIAL

kernels.get("cpu")
# The field of all who ask galois for it: compiled, as it is otherwise, it takes each of them four seconds.
galois.GF(2**8, irreducible_poly=POLYNOMIAL, primitive_element=2, compile="python-calculate")
