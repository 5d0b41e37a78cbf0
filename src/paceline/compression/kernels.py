"""Loops over elements, compiled: stochastic rounding to levels, and codes packed into bits.

Random numbers are hashes of a key and the element's index: the same key gives the same codes on any processor, with any number
of threads and in any order. Rounding uses 23 bits of the hash: it is unbiased to within 2^-24 of a level, and numbers on a
level, such as zero, do not change.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import float32, int32, uint8, uint32, uint64

from paceline.system.compilation import compiled

_DEAD = 64  # times the rounding of one number: as much of a column may be rounding errors of the product it comes from
_BLOCK = 512  # elements between two passes: their codes stay in the first cache
_FAST = {"contract", "nsz"}
_INFINITY = 0x7F800000  # as bits of a float32; NaN is above it
_PLACES = 23  # binary places of a level
_LEVEL = np.float32(2.0**_PLACES)
# Smaller scales are lifted: levels divided by one may be infinite.
_SMALL, _LIFT = np.float32(2.0**-60), np.float32(2.0**64)


@partial(compiled, nogil=True)
def largest(x_bits, bucket, scales_bits):  # noqa: ANN001, ANN201  (compiled; so are all below)
    """The largest magnitude of each bucket, as bits of a float32; returns whether all are finite.

    Magnitudes are compared by their bits, as integers: the order is the same, with infinity and NaN above all.
    """
    n, top = len(x_bits), uint32(0)
    for b in range(len(scales_bits)):
        most = uint32(0)
        for i in range(b * bucket, min(n, (b + 1) * bucket)):
            most = max(most, uint32(x_bits[i] & uint32(0x7FFFFFFF)))
        scales_bits[b] = most
        top = max(top, most)
    return top < uint32(_INFINITY)


@partial(compiled, nogil=True)
def euclidean_norms(x, bucket, most, scales):  # noqa: ANN001, ANN201
    """The Euclidean norm of each bucket, at most `most`, with the same bits on every processor."""
    for b in range(len(scales)):
        square = 0.0
        for i in range(b * bucket, min(len(x), (b + 1) * bucket)):
            square += np.float64(x[i]) * np.float64(x[i])
        scales[b] = float32(min(np.sqrt(square), most))


@partial(compiled, nogil=True)
def sum_of_peaks(scales, num_elements, bucket):  # noqa: ANN001, ANN201
    """The sum over buckets of their elements times their scale's square, with the same bits on every processor."""
    total = 0.0
    for b in range(len(scales)):
        total += min(bucket, num_elements - b * bucket) * np.float64(scales[b]) ** 2
    return total


@partial(compiled, nogil=True, fastmath=_FAST, inline="always")
def _round(x, scale, levels, key_1, key_2, first, codes):  # noqa: ANN001, ANN202
    """Levels (-levels to levels, counted from 0) of a block of x (m,), each the one below or above, in proportion."""
    if scale < _SMALL:
        x, scale = x * _LIFT, scale * _LIFT
    top, zero = float32(levels) * _LEVEL, int32(levels) << int32(_PLACES)
    inverse = top / scale if scale > 0 else float32(0)
    base = uint32(uint32(first) + key_1)
    for i in range(len(x)):
        h = uint32(uint32(uint32(i) + base) * uint32(0x9E3779B9))
        h = uint32(h ^ (h >> uint32(16)))
        h = uint32(h * uint32(0x7FEB352D))
        h = uint32(uint32(h ^ (h >> uint32(15))) + key_2)
        h = uint32(h * uint32(0x846CA68B))
        place = int32(np.rint(max(-top, min(x[i] * inverse, top))))
        codes[i] = uint8(uint32(uint32(place + zero) + (h >> uint32(32 - _PLACES))) >> uint32(_PLACES))


@partial(compiled, nogil=True, inline="always")
def _pack(codes, m, bits, out):  # noqa: ANN001, ANN202
    """Codes (m,) into bytes; beyond `m` they are 0."""
    for i in range(m, -(-m // 8) * 8):
        codes[i] = uint8(0)
    groups = -(-m // 8)
    if bits == 8:
        for i in range(8 * groups):
            out[i] = codes[i]
    elif bits == 4:
        for i in range(4 * groups):
            out[i] = codes[2 * i] | uint8(codes[2 * i + 1] << uint8(4))
    elif bits == 2:
        for i in range(2 * groups):
            out[i] = (
                codes[4 * i]
                | uint8(codes[4 * i + 1] << uint8(2))
                | uint8(codes[4 * i + 2] << uint8(4))
                | uint8(codes[4 * i + 3] << uint8(6))
            )
    else:
        for g in range(groups):
            word = uint64(0)
            for k in range(8):
                word |= uint64(codes[8 * g + k]) << uint64(bits * k)
            for k in range(bits):
                out[g * bits + k] = uint8((word >> uint64(8 * k)) & uint64(255))


@partial(compiled, nogil=True, inline="always")
def _unpack(packed, m, bits, codes):  # noqa: ANN001, ANN202
    groups = -(-m // 8)
    if bits == 8:
        for i in range(8 * groups):
            codes[i] = packed[i]
    elif bits == 4:
        for i in range(4 * groups):
            codes[2 * i] = packed[i] & uint8(15)
            codes[2 * i + 1] = packed[i] >> uint8(4)
    else:
        mask = uint64((1 << bits) - 1)
        for g in range(groups):
            word = uint64(0)
            for k in range(bits):
                word |= uint64(packed[g * bits + k]) << uint64(8 * k)
            for k in range(8):
                codes[8 * g + k] = uint8((word >> uint64(bits * k)) & mask)


@partial(compiled, nogil=True, fastmath=_FAST)
def encode_levels(x, scales, bucket, levels, bits, key_1, key_2, out):  # noqa: ANN001, ANN201
    """X (n,) rounded to 2 levels + 1 multiples of its bucket's scale / levels, packed into `out`; buckets are whole bytes."""
    n, codes = len(x), np.empty(_BLOCK, np.uint8)
    for b in range(len(scales)):
        end = min(n, (b + 1) * bucket)
        for first in range(b * bucket, end, _BLOCK):
            last = min(end, first + _BLOCK)
            _round(x[first:last], scales[b], levels, key_1, key_2, first, codes)
            _pack(codes, last - first, bits, out[first // 8 * bits :])


@partial(compiled, nogil=True, fastmath=_FAST)
def decode_levels(packed, scales, bucket, levels, bits, out):  # noqa: ANN001, ANN201
    """`out` (n,): each code's multiple of its bucket's scale / levels."""
    n, codes = len(out), np.empty(_BLOCK, np.uint8)
    for b in range(len(scales)):
        end, is_small = min(n, (b + 1) * bucket), scales[b] < _SMALL
        scale = scales[b] * _LIFT if is_small else scales[b]
        unit = scale / float32(levels)
        if float32(levels) * unit > scale:
            unit = np.nextafter(unit, float32(0))  # the largest level is at most the scale, and finite with it
        for first in range(b * bucket, end, _BLOCK):
            last = min(end, first + _BLOCK)
            _unpack(packed[first // 8 * bits :], last - first, bits, codes)
            part = out[first:last]
            for i in range(len(part)):
                part[i] = float32(int32(codes[i]) - int32(levels)) * unit
            if is_small:
                part /= _LIFT


@partial(compiled, nogil=True, fastmath=_FAST)
def encode_trits(x, scales, bucket, key_1, key_2, out):  # noqa: ANN001, ANN201
    """X (n,) rounded to -scale, 0 or scale of its bucket; five of them in a byte."""
    n = len(x)
    codes = np.ones(-(-n // 5) * 5, np.uint8)
    for b in range(len(scales)):
        first, last = b * bucket, min(n, (b + 1) * bucket)
        _round(x[first:last], scales[b], 1, key_1, key_2, first, codes[first:last])
    for i in range(len(out)):
        value = uint8(0)
        for k in range(5):
            value = uint8(value * uint8(3) + codes[5 * i + 4 - k])
        out[i] = value


@partial(compiled, nogil=True, fastmath=_FAST)
def decode_trits(packed, scales, bucket, out):  # noqa: ANN001, ANN201
    """`out` (n,): what `encode_trits` has packed."""
    n = len(out)
    for i in range(len(packed)):
        value = int32(packed[i])
        for k in range(5):
            at = 5 * i + k
            if at < n:
                out[at] = float32(value % 3 - 1) * scales[at // bucket]
            value //= 3


@partial(compiled, nogil=True)
def mean_magnitudes(x, bucket, scales):  # noqa: ANN001, ANN201
    """The mean magnitude of each bucket, with the same bits on every processor; returns whether all are finite."""
    n, finite = len(x), True
    for b in range(len(scales)):
        first, last, total = b * bucket, min(n, (b + 1) * bucket), 0.0
        for i in range(first, last):
            total += abs(np.float64(x[i]))
        scales[b] = float32(total / max(1, last - first))
        finite = finite and np.isfinite(scales[b])
    return finite


@partial(compiled, nogil=True)
def encode_signs(x, out):  # noqa: ANN001, ANN201
    """A bit for each element of x (n,): 1 for positive numbers and zero; bits beyond x are 0."""
    n = len(x)
    for i in range(len(out)):
        value = uint8(0)
        for k in range(min(8, n - 8 * i)):
            value |= uint8(uint8(x[8 * i + k] >= 0) << uint8(k))
        out[i] = value


@partial(compiled, nogil=True)
def decode_signs(packed, scales, bucket, out):  # noqa: ANN001, ANN201
    """`out` (n,): plus or minus its bucket's scale."""
    n = len(out)
    for b in range(len(scales)):
        scale = scales[b]
        for i in range(b * bucket, min(n, (b + 1) * bucket)):
            out[i] = scale if (packed[i >> 3] >> (i & 7)) & 1 else -scale


# Without fast mathematics: sums in the order of the elements, so that every processor gets the same bits from the same
# numbers.


@partial(compiled, nogil=True)
def orthonormalize(columns, begin):  # noqa: ANN001, ANN201
    """Makes the rows of `columns` (r, n) from `begin` on orthonormal to all before them; returns r, or the first dead row.

    Modified Gram-Schmidt, twice. A row is dead if it is zero, or if only rounding errors are left of it after the
    projections: the caller replaces it and calls again from there. Each row's length is compared with its own, so no scale
    matters.
    """
    rank, n = columns.shape
    least = _DEAD * np.finfo(columns.dtype).eps
    for a in range(begin, rank):
        largest = 0.0
        for i in range(n):
            largest = max(largest, abs(np.float64(columns[a, i])))
        if largest == 0.0:
            return a
        before = 0.0
        for i in range(n):
            columns[a, i] /= largest  # its square neither overflows nor underflows
            before += np.float64(columns[a, i]) ** 2
        for projection in range(2 * a):
            b, product = projection % a, 0.0
            for i in range(n):
                product += np.float64(columns[a, i]) * np.float64(columns[b, i])
            for i in range(n):
                columns[a, i] -= product * columns[b, i]
        after = 0.0
        for i in range(n):
            after += np.float64(columns[a, i]) ** 2
        if np.sqrt(after) <= least * np.sqrt(before):
            return a
        for i in range(n):
            columns[a, i] /= np.sqrt(after)
    return rank


@partial(compiled, nogil=True)
def add_products(left, right, out):  # noqa: ANN001, ANN201
    """`out` (n, m) becomes left' right, of left (r, n) and right (r, m)."""
    rank, n = left.shape
    m = right.shape[1]
    for i in range(n):
        for j in range(m):
            out[i, j] = left[0, i] * right[0, j]
        for r in range(1, rank):
            factor = left[r, i]
            for j in range(m):
                out[i, j] += factor * right[r, j]
