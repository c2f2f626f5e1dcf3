"""What a column of rows is stored as: a scheme, what it costs, and when its numbers come back as what.

Follows Check-N-Run (Eisenman et al., NSDI 2022), section on quantization.

- Methods, per row and of the stored copy only: published. That symmetric is 2^bits even steps over +-max|x|,
  and asymmetric over [min x, max x], both ends included: recalled.
- Two floats are kept of a row, which for rows of 128 and float32 makes it 12.8, 9.1, 7.1 and 3.76 times
  smaller with 2, 3, 4 and 8 bits: derived. Symmetric needs only one: chosen.
- Adaptive: the range is cut into bins, and shrinks by one of them at the end where that gives the lower L2
  error, until it has lost `ratio` of itself; the best seen is kept: recalled, as 25 bins for 2 and 3 bits
  and 45 for 4 are. 45 for 8 bits as well: chosen. The ratio: chosen (`RATIO`); `quantize_search` chooses both
  on a sample of rows, as published.
- K-means: 2^bits centroids of each row, kept with it; they begin evenly over the row's range, and
  `KMEANS_ITERATIONS` of Lloyd's algorithm follow, or fewer when nothing changes any more; in each, one of the
  centroids that nothing is nearest to goes to the number that is farthest from its own: chosen.

What holds for every row: a number comes back within one step of itself, (max x - min x) / (2^bits - 1) of
its row, for asymmetric, and 2 max|x| / (2^bits - 1) for symmetric; the L2 error of adaptive is not above
asymmetric's. A row of one value comes back exactly, unless symmetric. Rows that can't be stored so are stored
exactly, beside the others: those with a NaN or an infinity, those whose range is above float32's or below its
normal numbers, and those for which two float16 are too coarse (a mean far larger than the range, or numbers
beyond 65504 or near 6e-8).

Must not know: tensors, files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

Method = Literal["none", "symmetric", "asymmetric", "adaptive", "kmeans"]
Metadata = Literal["float32", "float16"]

METHODS: Final[tuple[Method, ...]] = get_args(Method)
METADATA: Final[tuple[Metadata, ...]] = get_args(Metadata)
BITS: Final = (2, 3, 4, 8)
"""Of a code."""
BINS: Final = {2: 25, 3: 25, 4: 45, 8: 45}
"""Bits -> into how many bins adaptive cuts a row's range, by default."""
RATIO: Final = 0.5
"""Of its range that adaptive takes away, by default: with more, the mean error of rows of 32 to 128 normal
numbers was less than 0.1 % smaller."""
KMEANS_ITERATIONS: Final = 25
KMEANS_BITS: Final = (2, 3, 4)
"""With 8 bits, 256 centroids a row would take more than most rows do."""


@dataclass(frozen=True)
class Scheme:
    """How rows are stored.

    Attributes:
        method: "none" stores them as they are, of any type.
        bits: of a code, one of `BITS`; of no meaning for "none".
        metadata: type of what is kept of each row.
        bins: of adaptive; 0 means `BINS`.
        ratio: of adaptive, in (0, 1]; 0 means `RATIO`.

    Raises:
        ValueError: there is no such scheme.
    """

    method: Method = "none"
    bits: int = 8
    metadata: Metadata = "float32"
    bins: int = 0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is one of {', '.join(METHODS)}; it is {self.method!r}")
        if self.bits not in BITS:
            raise ValueError(f"bits, of a code, are one of {BITS}; they are {self.bits!r}")
        if self.metadata not in METADATA:
            raise ValueError(f"metadata is one of {', '.join(METADATA)}; it is {self.metadata!r}")
        if self.method == "kmeans" and self.bits not in KMEANS_BITS:
            raise ValueError(
                f"k-means keeps 2^bits centroids of each row: for {self.bits} bits that is more than most "
                f"rows take; choose one of {KMEANS_BITS}, or asymmetric"
            )
        if self.method != "adaptive" and (self.bins or self.ratio):
            raise ValueError(f"bins and ratio are of adaptive's search; the method is {self.method!r}")
        if self.bins < 0 or not 0 <= self.ratio <= 1:
            raise ValueError(
                f"bins are 1 or more, and ratio is above 0 and at most 1, or both are 0 for what is usual; "
                f"they are {self.bins} and {self.ratio}"
            )

    @property
    def search(self) -> tuple[int, int]:
        """Bins of adaptive's search, and after how many moves it ends: ceil(bins ratio)."""
        bins = self.bins or BINS[self.bits]
        # As a decimal number that is no whole number of bins by an error of its last bit is meant.
        return bins, min(bins, math.ceil(bins * (self.ratio or RATIO) - 1e-9))

    @property
    def kept(self) -> int:
        """Numbers that are kept of each row, beside its codes."""
        by_method = {"none": 0, "symmetric": 1, "asymmetric": 2, "adaptive": 2, "kmeans": 2**self.bits}
        return by_method[self.method]

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` float32, if it needn't be stored exactly."""
        if self.method == "none":
            return 4 * width
        return -(-width * self.bits // 8) + self.kept * (4 if self.metadata == "float32" else 2)


EXACT: Final = Scheme()
"""Stores rows as they are."""
