// crc32 with zlib's polynomial: bytes through tables, long stretches by carry-less multiplication.
// Included by kernels.cpp only, so that each instruction set has a copy of its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "polynomials.h"

#if defined(__PCLMUL__)
#include <immintrin.h>
#endif

namespace shardwell {
namespace {

struct CrcTables {
    uint32_t of[8][256];  // of[k][byte]: what a byte does to the sum when k more bytes follow
};

constexpr CrcTables make_crc_tables() {
    CrcTables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = times_x(value);
        tables.of[0][byte] = value;
    }
    for (int k = 1; k < 8; ++k) {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables.of[k - 1][byte];
            tables.of[k][byte] = before >> 8 ^ tables.of[0][before & 0xff];
        }
    }
    return tables;
}

constexpr CrcTables CRC = make_crc_tables();

inline uint32_t crc_by_tables(uint32_t sum, const uint8_t* data, int64_t n) {
    for (; n >= 8; n -= 8, data += 8) {
        uint64_t word;
        std::memcpy(&word, data, 8);  // little endian, as every machine that torch has wheels for
        word ^= sum;
        sum = 0;
        for (int k = 0; k < 8; ++k) sum ^= CRC.of[7 - k][word >> (8 * k) & 0xff];
    }
    for (; n > 0; --n, ++data) sum = sum >> 8 ^ CRC.of[0][(sum ^ *data) & 0xff];
    return sum;
}

#if defined(__PCLMUL__)

// x^n modulo the polynomial, as the 64-bit factor of a carry-less product.
constexpr uint64_t power(int n) {
    uint32_t value = ONE;
    for (int i = 0; i < n; ++i) value = times_x(value);
    return uint64_t{value} << 32;
}

// Moves 128 bits of the message `distance` bits on: the low word holds the higher powers. A product of reflected words
// comes out one power too high, hence the minus one.
template <int distance>
inline __m128i moved(__m128i value) {
    const __m128i factors =
        _mm_set_epi64x(static_cast<int64_t>(power(distance - 1)), static_cast<int64_t>(power(distance + 64 - 1)));
    return _mm_xor_si128(_mm_clmulepi64_si128(value, factors, 0x00), _mm_clmulepi64_si128(value, factors, 0x11));
}

inline __m128i load_16(const uint8_t* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

// Goes on from four lanes over what follows, and ends: what is left of them is congruent to them and 16 bytes long.
inline uint32_t crc_from_lanes(__m128i (&lanes)[4], const uint8_t* data, int64_t n) {
    for (; n >= 64; data += 64, n -= 64) {
        for (int lane = 0; lane < 4; ++lane) {
            lanes[lane] = _mm_xor_si128(moved<512>(lanes[lane]), load_16(data + 16 * lane));
        }
    }
    __m128i rest = lanes[0];
    for (int lane = 1; lane < 4; ++lane) rest = _mm_xor_si128(moved<128>(rest), lanes[lane]);
    alignas(16) uint8_t bytes[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes), rest);
    return crc_by_tables(crc_by_tables(0, bytes, 16), data, n);
}

// At least 64 bytes.
inline uint32_t crc_by_products(uint32_t sum, const uint8_t* data, int64_t n) {
    __m128i lanes[4];
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = load_16(data + 16 * lane);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(sum)));
    return crc_from_lanes(lanes, data + 64, n - 64);
}

#if defined(__AVX512F__)
#define SHARDWELL_WIDE __attribute__((target("vpclmulqdq")))  // not every machine with AVX-512 has it

template <int distance>
SHARDWELL_WIDE inline __m512i moved_wide(__m512i value, __m512i data) {
    constexpr auto near = static_cast<int64_t>(power(distance - 1));
    constexpr auto far = static_cast<int64_t>(power(distance + 64 - 1));
    const __m512i factors = _mm512_set4_epi64(near, far, near, far);
    const __m512i low = _mm512_clmulepi64_epi128(value, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(value, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, data, 0x96);  // the sum of the three
}

// At least 256 bytes, in four registers of four lanes.
SHARDWELL_WIDE inline uint32_t crc_by_wide_products(uint32_t sum, const uint8_t* data, int64_t n) {
    __m512i wide[4];
    for (int i = 0; i < 4; ++i) wide[i] = _mm512_loadu_si512(data + 64 * i);
    wide[0] = _mm512_xor_si512(wide[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(sum))));
    for (data += 256, n -= 256; n >= 256; data += 256, n -= 256) {
        for (int i = 0; i < 4; ++i) wide[i] = moved_wide<2048>(wide[i], _mm512_loadu_si512(data + 64 * i));
    }
    __m512i rest = wide[0];
    for (int i = 1; i < 4; ++i) rest = moved_wide<512>(rest, wide[i]);
    __m128i lanes[4];
    std::memcpy(lanes, &rest, sizeof lanes);
    return crc_from_lanes(lanes, data, n);
}
#endif

#endif

inline uint32_t crc32(uint32_t value, const uint8_t* data, int64_t n) {
#if defined(__AVX512F__)
    static const bool has_wide = __builtin_cpu_supports("vpclmulqdq");
    if (has_wide && n >= 256) return ~crc_by_wide_products(~value, data, n);
#endif
#if defined(__PCLMUL__)
    if (n >= 64) return ~crc_by_products(~value, data, n);
#endif
    return ~crc_by_tables(~value, data, n);
}

}  // namespace
}  // namespace shardwell
