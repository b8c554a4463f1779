// Rows of numbers as codes, with one scale for each block: src/shardwell/codec says what they mean, and its
// reference.py gives the same bits. A block is encoded or decoded in the first-level cache, always as a whole one:
// where a row ends within it, zeros follow. Included by kernels.cpp only.
#pragma once

#include "numbers.h"

namespace shardwell {
namespace {

constexpr uint32_t LEAST_SCALE = 11u << 7;  // 2^-116 in bf16: blocks with less are zeros
constexpr float TO_INTEGER = 0x1.8p23f;     // added to a small number, rounds it; the integer is in the low bits
constexpr float TO_SUBNORMAL = 0x1p14f;     // the same for multiples of 2^-9

// 1 / the largest code (127, 7, 448), rounded down.
constexpr float share_of(Kind kind) {
    return kind == Kind::int8 ? 0x1.020408p-7f : kind == Kind::int4 ? 0x1.249248p-3f : 0x1.249248p-9f;
}

constexpr int64_t padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// Of n elements that begin with a block, with padding.
constexpr int64_t code_bytes(Kind kind, int64_t n) { return padded(kind == Kind::int4 ? (n + 1) / 2 : n); }

constexpr int64_t NUM_CODE_BYTES[] = {BLOCK, BLOCK / 2, BLOCK};

constexpr int64_t AHEAD = 4;  // blocks. Measured: 2 and 8 are 13 % and 12 % slower, none 40 %

struct CodecTile {
    alignas(LINE) float values[BLOCK];
    alignas(LINE) uint16_t narrow[BLOCK];
    alignas(LINE) uint8_t codes[BLOCK];
};

// --- one block ---

// The scale of a block, in bf16: the greatest magnitude / the largest code, rounded up.
inline uint16_t block_scale(const float* values, float share) {
    uint32_t greatest = 0;
#pragma omp simd reduction(max : greatest)
    for (int64_t i = 0; i < BLOCK; ++i) {
        const uint32_t magnitude = bits_of(values[i]) & MAGNITUDE;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    if (greatest >= INFINITE) return BF16_NAN;
    const uint32_t upper = (bits_of(float_of(greatest) * share) + 0xffff) >> 16;
    return static_cast<uint16_t>(upper < LEAST_SCALE ? 0 : upper);
}

inline uint8_t to_e4m3(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & MAGNITUDE;
    const uint32_t subnormal = bits_of(float_of(magnitude) + TO_SUBNORMAL) - bits_of(TO_SUBNORMAL);
    const uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
    return static_cast<uint8_t>((magnitude < 0x3c800000 ? subnormal : normal) | (bits >> 24 & 0x80));
}

inline float from_e4m3(uint32_t code) {
    const uint32_t magnitude = code & 0x7f;
    const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
    const uint32_t normal = magnitude == 0x7f ? 0x7fc00000 : (magnitude << 20) + (120u << 23);
    return float_of((magnitude < 8 ? bits_of(subnormal) : normal) | (code & 0x80) << 24);
}

// No code is out of range: the scale was rounded up.
template <Kind kind>
inline void to_codes(const float* values, float inverse, uint8_t* __restrict codes) {
    if (kind == Kind::int4) {
#pragma omp simd
        for (int64_t i = 0; i < BLOCK / 2; ++i) {
            const uint32_t first = bits_of(values[2 * i] * inverse + TO_INTEGER);
            const uint32_t second = bits_of(values[2 * i + 1] * inverse + TO_INTEGER);
            codes[i] = static_cast<uint8_t>((first & 15) | second << 4);
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < BLOCK; ++i) {
        const float scaled = values[i] * inverse;
        codes[i] = kind == Kind::fp8 ? to_e4m3(scaled) : static_cast<uint8_t>(bits_of(scaled + TO_INTEGER));
    }
}

inline float signed_nibble(uint32_t nibble) { return static_cast<float>(static_cast<int32_t>(nibble ^ 8) - 8); }

// The numbers of a block, or their sums with what is there.
template <Kind kind, bool add>
inline void from_codes(const uint8_t* codes, float scale, float* __restrict out) {
    if (kind == Kind::int4) {
#pragma omp simd
        for (int64_t i = 0; i < BLOCK / 2; ++i) {
            const float first = signed_nibble(codes[i] & 15u) * scale, second = signed_nibble(codes[i] >> 4) * scale;
            out[2 * i] = add ? out[2 * i] + first : first;
            out[2 * i + 1] = add ? out[2 * i + 1] + second : second;
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < BLOCK; ++i) {
        const float code = kind == Kind::fp8 ? from_e4m3(codes[i]) : static_cast<float>(static_cast<int8_t>(codes[i]));
        out[i] = add ? out[i] + code * scale : code * scale;
    }
}

// --- blocks in rows ---

// A block: where its numbers, its codes and its scale lie. Numbers count from the beginning of the values.
struct Place {
    int64_t value;
    uint8_t* codes;
    uint8_t* scale;
    int64_t n;
    int64_t padding;  // bytes after the scale
};

template <class Work>
void each_block(const Coded& c, int64_t begin, int64_t end, const Work& work) {
    const int64_t blocks = (c.numel + BLOCK - 1) / BLOCK;
    const int64_t scales = code_bytes(c.kind, c.numel), size = NUM_CODE_BYTES[static_cast<int>(c.kind)];
    while (begin < end) {
        const int64_t row = begin / blocks, outer = row / c.inner, inner = row % c.inner;
        const int64_t values = outer * c.value_strides[0] + inner * c.value_strides[1];
        uint8_t* const data = c.data + outer * c.data_strides[0] + inner * c.data_strides[1];
        for (int64_t block = begin % blocks; block < blocks && begin < end; ++block, ++begin) {
            const int64_t left = c.numel - block * BLOCK;
            work(Place{values + block * BLOCK, data + block * size, data + scales + 2 * block,
                       left < BLOCK ? left : BLOCK, block == blocks - 1 ? padded(2 * blocks) - 2 * blocks : 0});
        }
    }
}

// Asks for the numbers of a block that comes soon, while there is work on another.
inline void expect_values(const Coded& c, const Place& at) {
    const int64_t size = c.number == Number::fp32 ? 4 : 2;
    const auto* const soon = static_cast<const uint8_t*>(c.values) + (at.value + AHEAD * BLOCK) * size;
    for (int64_t i = 0; i < BLOCK * size; i += LINE) __builtin_prefetch(soon + i);
}

inline const float* block_values(const Coded& c, const Place& at, CodecTile& tile) {
    if (c.number == Number::fp32 && at.n == BLOCK) return static_cast<const float*>(c.values) + at.value;
    widen(c.values, c.number, at.value, at.n, 1.0f, tile.values);
    std::memset(tile.values + at.n, 0, static_cast<size_t>(BLOCK - at.n) * sizeof(float));
    return tile.values;
}

// The decoded numbers of one message's block, in the tile.
template <Kind kind, bool add>
inline void decode_block(const Place& at, int64_t offset, CodecTile& tile) {
    uint16_t scale;
    std::memcpy(&scale, at.scale + offset, sizeof scale);
    const uint8_t* codes = at.codes + offset;
    if (at.n < BLOCK) {
        std::memcpy(tile.codes, codes, static_cast<size_t>(code_bytes(kind, at.n)));
        codes = tile.codes;
    }
    from_codes<kind, add>(codes, from_bf16(scale), tile.values);
}

inline void write_values(const Coded& c, const Place& at, CodecTile& tile) {
    auto* const out = static_cast<uint8_t*>(c.values);
    if (c.number == Number::fp32) {
        copy_past_cache(out + at.value * 4, reinterpret_cast<const uint8_t*>(tile.values), at.n * 4);
        return;
    }
    if (c.number == Number::fp16) {
        narrow_fp16(tile.values, tile.narrow, at.n);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < at.n; ++i) tile.narrow[i] = to_bf16_even(tile.values[i]);
    }
    copy_past_cache(out + at.value * 2, reinterpret_cast<const uint8_t*>(tile.narrow), at.n * 2);
}

template <Kind kind>
void encode_blocks(const Coded& c, int64_t begin, int64_t end) {
    CodecTile tile;
    each_block(c, begin, end, [&](const Place& at) {
        expect_values(c, at);
        const float* const values = block_values(c, at, tile);
        const uint16_t scale = block_scale(values, share_of(kind));
        if (scale == 0 || scale == BF16_NAN) {
            std::memset(tile.codes, 0, sizeof tile.codes);
        } else {
            to_codes<kind>(values, 1.0f / from_bf16(scale), tile.codes);
        }
        copy_past_cache(at.codes, tile.codes, code_bytes(kind, at.n));
        std::memcpy(at.scale, &scale, sizeof scale);
        std::memset(at.scale + sizeof scale, 0, static_cast<size_t>(at.padding));
    });
    finish_stores();
}

template <Kind kind>
void decode_blocks(const Coded& c, int64_t begin, int64_t end) {
    CodecTile tile{};
    each_block(c, begin, end, [&](const Place& at) {
        decode_block<kind, false>(at, 0, tile);
        write_values(c, at, tile);
    });
    finish_stores();
}

template <Kind kind>
void sum_blocks(const Coded& c, int64_t begin, int64_t end) {
    CodecTile tile{};
    each_block(c, begin, end, [&](const Place& at) {
        decode_block<kind, false>(at, 0, tile);
        for (int64_t k = 1; k < c.num_messages; ++k) decode_block<kind, true>(at, k * c.message_stride, tile);
        float* const out = static_cast<float*>(c.values) + at.value;
#pragma omp simd
        for (int64_t i = 0; i < BLOCK; ++i) tile.values[i] *= c.factor;
        if (!c.add) {
            write_values(c, at, tile);
            return;
        }
#pragma omp simd
        for (int64_t i = 0; i < at.n; ++i) out[i] += tile.values[i];
    });
    finish_stores();
}

void encode_rows(const Coded& c, int64_t begin, int64_t end) {
    constexpr decltype(&encode_rows) KERNELS[] = {encode_blocks<Kind::int8>, encode_blocks<Kind::int4>,
                                                  encode_blocks<Kind::fp8>};
    KERNELS[static_cast<int>(c.kind)](c, begin, end);
}

void decode_rows(const Coded& c, int64_t begin, int64_t end) {
    constexpr decltype(&decode_rows) KERNELS[] = {decode_blocks<Kind::int8>, decode_blocks<Kind::int4>,
                                                  decode_blocks<Kind::fp8>};
    KERNELS[static_cast<int>(c.kind)](c, begin, end);
}

void sum_of_rows(const Coded& c, int64_t begin, int64_t end) {
    constexpr decltype(&sum_of_rows) KERNELS[] = {sum_blocks<Kind::int8>, sum_blocks<Kind::int4>,
                                                  sum_blocks<Kind::fp8>};
    KERNELS[static_cast<int>(c.kind)](c, begin, end);
}

}  // namespace
}  // namespace shardwell
