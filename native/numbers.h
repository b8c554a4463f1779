// Number formats: bf16 and fp16 to fp32 and back, fp32 as two halves, and stores that pass the caches by.
// Included by kernels.cpp only, so that each instruction set has a copy of its own.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(SHARDWELL_X86)
#include <immintrin.h>
#endif

#include "shardwell_native.h"

namespace shardwell {
namespace {

constexpr uint32_t MAGNITUDE = 0x7fffffff;
constexpr uint32_t INFINITE = 0x7f800000;
constexpr uint16_t BF16_NAN = 0x7fc0;
constexpr int64_t LINE = 64;  // bytes of a cache line

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float from_bf16(uint16_t bits) { return float_of(uint32_t{bits} << 16); }

// Half away from zero, as src/shardwell/kernels/rounding.py: the lower half stays recoverable as a signed remainder.
inline uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    return (bits & MAGNITUDE) > INFINITE ? BF16_NAN : static_cast<uint16_t>((bits + 0x8000) >> 16);
}

// To nearest, ties to even.
inline uint16_t to_bf16_even(float value) {
    const uint32_t bits = bits_of(value);
    return (bits & MAGNITUDE) > INFINITE ? BF16_NAN : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_halves(uint16_t high, int16_t low) {
    const uint32_t upper = uint32_t{high} << 16;
    const uint32_t joined = upper + static_cast<uint32_t>(int32_t{low});
    // A NaN stays what it is. A number that becomes one is no half of the remainder: it was set by hand.
    const bool is_nan = (upper & MAGNITUDE) > INFINITE || (joined & MAGNITUDE) > INFINITE;
    return float_of(is_nan ? upper : joined);
}

inline float from_fp16(uint16_t bits) {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) return float_of(sign | INFINITE | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x0400) return float_of(sign | ((magnitude << 13) + 0x38000000));
    const float value = static_cast<float>(magnitude) * 0x1p-24f;  // subnormal, exact
    return float_of(sign | bits_of(value));
}

// To nearest, ties to even.
inline uint16_t to_fp16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & MAGNITUDE;
    if (magnitude > INFINITE) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more
    if (magnitude < 0x38800000) {  // below 2^-14: the sum rounds to a multiple of 2^-24
        return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}

// --- in bulk: `out[i] = f(in[i])` for n elements that do not overlap ---

inline void widen_fp16(const uint16_t* in, float factor, float* __restrict out, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
        const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(wide, _mm256_set1_ps(factor)));
    }
#endif
    for (; i < n; ++i) out[i] = from_fp16(in[i]) * factor;
}

inline void narrow_fp16(const float* in, uint16_t* __restrict out, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
    }
#endif
    for (; i < n; ++i) out[i] = to_fp16(in[i]);
}

inline void narrow_bf16(const float* in, uint16_t* __restrict out, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(in[i]);
}

// A gradient of any type as fp32, times a factor.
inline void widen(const void* data, Number type, int64_t begin, int64_t n, float factor, float* __restrict out) {
    if (type == Number::fp32) {
        const float* in = static_cast<const float*>(data) + begin;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) out[i] = in[i] * factor;
    } else if (type == Number::bf16) {
        const uint16_t* in = static_cast<const uint16_t*>(data) + begin;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(in[i]) * factor;
    } else {
        widen_fp16(static_cast<const uint16_t*>(data) + begin, factor, out, n);
    }
}

inline void join(const uint16_t* high, const int16_t* low, float* __restrict out, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = from_halves(high[i], low[i]);
}

inline void split(const float* in, uint16_t* __restrict high, int16_t* __restrict low, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        high[i] = to_bf16(in[i]);
        low[i] = static_cast<int16_t>(bits_of(in[i]) & 0xffff);
    }
}

// --- stores ---

// How many bytes are missing from `address` to the next cache line.
inline int64_t to_next_line(const void* address) {
    return -static_cast<int64_t>(reinterpret_cast<uintptr_t>(address)) & (LINE - 1);
}

// Copies bytes; whole lines of `out` go to memory without being read first.
inline void copy_past_cache(uint8_t* out, const uint8_t* in, int64_t n) {
#if defined(__SSE2__)
    const int64_t missing = to_next_line(out);
    const int64_t head = missing < n ? missing : n;
    std::memcpy(out, in, static_cast<size_t>(head));
    int64_t i = head;
    for (; i + LINE <= n; i += LINE) {
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(in + i));
#else
        for (int64_t part = i; part < i + LINE; part += 16) {
            const __m128i data = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + part));
            _mm_stream_si128(reinterpret_cast<__m128i*>(out + part), data);
        }
#endif
    }
    std::memcpy(out + i, in + i, static_cast<size_t>(n - i));
#else
    std::memcpy(out, in, static_cast<size_t>(n));
#endif
}

// Makes what was stored past the caches visible to other threads and devices.
inline void finish_stores() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace
}  // namespace shardwell
