// Polynomials over two elements modulo that of zlib's crc32, the coefficient of x^0 in the top bit.
#pragma once

#include <cstdint>

namespace shardwell {
namespace {

constexpr uint32_t POLYNOMIAL = 0xedb88320;
constexpr uint32_t ONE = 0x80000000;

constexpr uint32_t times_x(uint32_t value) { return value >> 1 ^ (value & 1 ? POLYNOMIAL : 0); }

constexpr uint32_t product(uint32_t first, uint32_t second) {
    uint32_t sum = 0;
    for (; first; first <<= 1, second = times_x(second)) sum ^= first & ONE ? second : 0;
    return sum;
}

// What a checksum is multiplied by when `num_bytes` more bytes follow: x^(8 * num_bytes).
constexpr uint32_t power_of_bytes(int64_t num_bytes) {
    uint32_t result = ONE, square = ONE >> 8;
    for (; num_bytes > 0; num_bytes >>= 1, square = product(square, square)) {
        if (num_bytes & 1) result = product(result, square);
    }
    return result;
}

}  // namespace
}  // namespace shardwell
