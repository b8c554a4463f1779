// Moments in 8 bits an element and one exponent a block.
//
// A code is the top of an fp32 number: 3 bits of its fraction, and as much of its exponent as fits when counted down
// from the block's. So steps are an eighth of a power of two, wherever in its range a number lies:
//
//     first moment     sign, 4 bits, 3 bits    2^E down to 2^(E-15), linear from there to 0
//     second moment          5 bits, 3 bits    2^E down to 2^(E-31), and never below that (but 0 where E is that low)
//
// Numbers are rounded up or down at random, in proportion: what changes by less than a step still changes on average.
// The chance is a hash of seed and place, so a run can be repeated. In a block that holds a NaN, the greatest code
// stands for it. Included by kernels.cpp only.
#pragma once

#include "numbers.h"

namespace shardwell {
namespace {

constexpr int DROPPED = 20;  // bits of an fp32 number that a code leaves out
constexpr uint32_t BELOW = (1u << DROPPED) - 1;
constexpr uint32_t CODES_PER_EXPONENT = 8;

struct Scale {
    uint32_t base;  // the top of the number whose code is 0
    float offset;   // what is added to a first moment before its code is taken: that number
};

// `span` exponents below the block's own have codes.
inline Scale scale_of(uint32_t exponent, uint32_t span) {
    const uint32_t lowest = exponent > span ? exponent - span : 0;
    return {lowest * CODES_PER_EXPONENT, float_of(lowest << 23)};
}

constexpr uint32_t SPAN1 = 15;
constexpr uint32_t SPAN2 = 31;

inline uint32_t hash(uint32_t value) {
    value = (value ^ value >> 16) * 0x7feb352du;
    value = (value ^ value >> 15) * 0x846ca68bu;
    return value ^ value >> 16;
}

// The exponent of the greatest number of a block, once that is rounded up.
inline uint8_t exponent_of(const float* values, int64_t n) {
    uint32_t greatest = 0;
#pragma omp simd reduction(max : greatest)
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = bits_of(values[i]) & MAGNITUDE;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    const uint32_t exponent = (greatest + BELOW) >> 23;
    return static_cast<uint8_t>(exponent < 255 ? exponent : 255);  // inf and NaN
}

inline void decode1(const uint8_t* codes, uint8_t exponent, float* __restrict out, int64_t n) {
    const Scale scale = scale_of(exponent, SPAN1);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t code = codes[i];
        const float magnitude = float_of(((code & 0x7f) + scale.base) << DROPPED) - scale.offset;
        out[i] = float_of(bits_of(magnitude) | (code & 0x80) << 24);
    }
}

inline void decode2(const uint8_t* codes, uint8_t exponent, float* __restrict out, int64_t n) {
    const Scale scale = scale_of(exponent, SPAN2);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = float_of((codes[i] + scale.base) << DROPPED);
}

// `place` is the number of the first element in its stretch, `key` the hash of the stretch's seed. The low 12 bits of
// an element's hash are the first moment's chance, the high 20 the second's.
inline void encode(const float* first, const float* second, uint8_t* __restrict codes1, uint8_t* __restrict codes2,
                   uint8_t& exponent1, uint8_t& exponent2, int64_t n, uint32_t place, uint32_t key) {
    exponent1 = exponent_of(first, n);
    exponent2 = exponent_of(second, n);
    const Scale scale1 = scale_of(exponent1, SPAN1);
    const Scale scale2 = scale_of(exponent2, SPAN2);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t chance = hash((place + static_cast<uint32_t>(i)) ^ key);
        const uint32_t bits1 = bits_of(first[i]), magnitude1 = bits1 & MAGNITUDE;
        const uint32_t shifted = bits_of(float_of(magnitude1) + scale1.offset);
        const uint32_t code1 = ((shifted + ((chance & 0xfff) << 8)) >> DROPPED) - scale1.base;
        const uint32_t signed1 = (code1 < 0x7f ? code1 : 0x7f) | (bits1 >> 24 & 0x80);
        codes1[i] = static_cast<uint8_t>(magnitude1 > INFINITE ? 0x7f : signed1);
        const uint32_t magnitude2 = bits_of(second[i]) & MAGNITUDE;
        const uint32_t top2 = (magnitude2 + (chance >> 12)) >> DROPPED;
        const uint32_t code2 = top2 > scale2.base ? top2 - scale2.base : 0;
        codes2[i] = static_cast<uint8_t>(magnitude2 > INFINITE || code2 > 0xff ? 0xff : code2);
    }
}

}  // namespace
}  // namespace shardwell
