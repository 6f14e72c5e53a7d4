"""Floating-point formats with their ranges and precisions, derived from their numbers of bits, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary floating-point format (IEEE 754), named like its torch dtype, with the stored bits of its fields."""

    name: str
    exponent_bits: int
    mantissa_bits: int

    @property
    def bias(self) -> int:
        """Exponent bias, which is also the exponent of the largest finite values; 15 for FP16."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def max(self) -> float:
        """Largest finite value; 65504 for FP16."""
        return (2 - 2.0**-self.mantissa_bits) * 2.0**self.bias

    @property
    def smallest_normal(self) -> float:
        """Smallest value with full precision; 2^-14 for FP16."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest value above zero; 2^-24 for FP16."""
        return self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value; 2^-10 for FP16."""
        return 2.0**-self.mantissa_bits


FLOAT32 = Format("float32", exponent_bits=8, mantissa_bits=23)
FLOAT16 = Format("float16", exponent_bits=5, mantissa_bits=10)
BFLOAT16 = Format("bfloat16", exponent_bits=8, mantissa_bits=7)
FORMATS = {fmt.name: fmt for fmt in (FLOAT32, FLOAT16, BFLOAT16)}
