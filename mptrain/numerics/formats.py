"""Floating-point formats with their ranges and precisions, derived from their numbers of bits, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary floating-point format, named like its torch dtype, with the stored bits of its fields.

    Attributes:
        name: Name of the dtype.
        exponent_bits: Stored bits of the exponent.
        mantissa_bits: Stored bits of the mantissa.
        specials: Topmost patterns of each sign that are infinity or NaN; None for all of the highest exponent, as in
            IEEE 754.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: int | None = None

    @property
    def bits(self) -> int:
        """Bits of a value, its sign included; 16 for FP16."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Exponent bias; 15 for FP16."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value; 15 for FP16, 8 for E4M3."""
        return (self._largest >> self.mantissa_bits) - self.bias

    @property
    def max(self) -> float:
        """Largest finite value; 65504 for FP16."""
        mantissa = self._largest % (1 << self.mantissa_bits)
        return (1 + mantissa * 2.0**-self.mantissa_bits) * 2.0**self.max_exponent

    @property
    def _largest(self) -> int:
        """Bits of the largest finite value."""
        specials = 1 << self.mantissa_bits if self.specials is None else self.specials
        return (1 << (self.bits - 1)) - 1 - specials

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

#: Formats of FP8 (Micikevicius et al. 2022, arXiv 2209.05433), which calls the first E4M3 and the second E5M2, and of
#: FP4 (OCP Microscaling Formats v1.0). E4M3 has no infinity and E2M1 has neither that nor NaN.
FLOAT8_E4M3 = Format("float8_e4m3fn", exponent_bits=4, mantissa_bits=3, specials=1)
FLOAT8_E5M2 = Format("float8_e5m2", exponent_bits=5, mantissa_bits=2)
FLOAT4_E2M1 = Format("float4_e2m1fn", exponent_bits=2, mantissa_bits=1, specials=0)

#: Those in which torch computes, by name.
FORMATS = {fmt.name: fmt for fmt in (FLOAT32, FLOAT16, BFLOAT16)}
