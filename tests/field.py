"""galois' field, made in a process that others are forked from; with numba each of them compiles for 4 s."""

from __future__ import annotations

import os

os.environ["NUMBA_NUM_THREADS"] = "1"  # its threads would not be there in what is forked

import galois

from ecemb.code import POLYNOMIAL

galois.GF(2**8, irreducible_poly=POLYNOMIAL, primitive_element=2, compile="python-calculate")
