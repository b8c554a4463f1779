// The kernels, written once as plain loops and compiled for each instruction set (SHARDWELL_ISA names it).
//
// A stretch is walked in tiles that stay in the first-level cache: widen the gradient, update master and state, narrow
// the result. Memory is read and written once. Every fp32 operation is rounded on its own (no fused multiply-add), so
// all instruction sets give the same bits, and so does src/shardwell/native/reference.py.

#include "kernels.h"

#include <cmath>

#include "crc.h"
#include "moments8.h"
#include "numbers.h"

namespace shardwell {
namespace {

constexpr int64_t TILE = 128;  // measured: 256 and 64 are 7 % and 4 % slower

struct Tile {
    alignas(LINE) float gradient[BLOCK];
    alignas(LINE) float master[BLOCK];
    alignas(LINE) float first[BLOCK];
    alignas(LINE) float second[BLOCK];
    alignas(LINE) uint16_t out[BLOCK];
};

// --- the rules: one loop each over a tile ---

// As torch.lerp: from the nearer end.
inline float lerp(float from, float to, float weight) {
    const float difference = to - from;
    return weight < 0.5f ? from + weight * difference : to + (weight - 1.0f) * difference;
}

inline float sign(float value) { return static_cast<float>(value > 0.0f) - static_cast<float>(value < 0.0f); }

struct AdamTile {
    const Adam& c;

    void operator()(float* __restrict p, const float* __restrict gradient, float* __restrict m, float* __restrict v,
                    int64_t n) const {
        const Adam a = c;
        const bool decays = a.coupled != 0.0f;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float g = decays ? gradient[i] + a.coupled * p[i] : gradient[i];
            m[i] = lerp(m[i], g, a.weight1);
            v[i] = a.beta2 * v[i] + a.weight2 * g * g;
            const float denominator = std::sqrt(v[i]) / a.root + a.eps;
            p[i] = a.decay * p[i] + a.step_size * m[i] / denominator;
        }
    }
};

template <bool with_momentum>
struct SgdTile {
    const Sgd& c;

    void operator()(float* __restrict p, const float* __restrict gradient, float* __restrict momentum, float*,
                    int64_t n) const {
        const Sgd a = c;
        const bool decays = a.coupled != 0.0f;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            float g = decays ? gradient[i] + a.coupled * p[i] : gradient[i];
            if (with_momentum) {
                momentum[i] = a.first ? g : a.momentum * momentum[i] + a.weight * g;
                g = a.nesterov ? g + a.momentum * momentum[i] : momentum[i];
            }
            p[i] = p[i] + a.rate * g;
        }
    }
};

struct AdagradTile {
    const Adagrad& c;

    void operator()(float* __restrict p, const float* __restrict gradient, float* __restrict sum, float*,
                    int64_t n) const {
        const Adagrad a = c;
        const bool decays = a.coupled != 0.0f;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float g = decays ? gradient[i] + a.coupled * p[i] : gradient[i];
            sum[i] = sum[i] + g * g;
            p[i] = p[i] + a.rate * g / (std::sqrt(sum[i]) + a.eps);
        }
    }
};

struct LionTile {
    const Lion& c;

    void operator()(float* __restrict p, const float* __restrict g, float* __restrict momentum, float*,
                    int64_t n) const {
        const Lion a = c;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float direction = sign(lerp(momentum[i], g[i], a.weight1));
            p[i] = a.decay * p[i] + a.rate * direction;
            momentum[i] = lerp(momentum[i], g[i], a.weight2);
        }
    }
};

// --- walking a stretch ---

inline void write_out(const Stretch& s, int64_t at, int64_t n, const float* master, uint16_t* room) {
    if (s.out_type == Number::bf16) {
        narrow_bf16(master, room, n);
    } else {
        narrow_fp16(master, room, n);
    }
    copy_past_cache(reinterpret_cast<uint8_t*>(s.out + at), reinterpret_cast<const uint8_t*>(room), n * 2);
}

// One tile: `first` and `second` are its state, wherever that is.
template <class Rule>
inline void step_tile(const Stretch& s, const Rule& rule, int64_t at, int64_t n, float* first, float* second,
                      Tile& tile) {
    widen(s.gradient, s.gradient_type, at, n, s.factor, tile.gradient);
    float* master = s.master ? s.master + at : tile.master;
    if (!s.master) join(s.high + at, s.low + at, master, n);
    rule(master, tile.gradient, first, second, n);
    if (!s.master) split(master, s.high + at, s.low + at, n);
    if (s.out) write_out(s, at, n, master, tile.out);
}

template <class Rule>
void step(const Stretch& s, const Rule& rule, int64_t begin, int64_t end) {
    Tile tile;
    // The first tile ends where a cache line of `out` begins, so that all others write whole lines.
    int64_t n = s.out ? to_next_line(s.out + begin) / 2 : 0;
    for (int64_t at = begin; at < end; at += n, n = TILE) {
        if (n == 0 || n > end - at) n = end - at < TILE ? end - at : TILE;
        float* first = s.state[0] ? s.state[0] + at : nullptr;
        float* second = s.state[1] ? s.state[1] + at : nullptr;
        step_tile(s, rule, at, n, first, second, tile);
    }
    finish_stores();
}

// Here a tile is a block.
void step_adam8(const Stretch& s, const Adam& adam, int64_t begin, int64_t end) {
    Tile tile;
    const uint32_t key = hash(s.seed);
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int64_t n = end - at < BLOCK ? end - at : BLOCK, block = at / BLOCK;
        decode1(s.codes[0] + at, s.exponents[0][block], tile.first, n);
        decode2(s.codes[1] + at, s.exponents[1][block], tile.second, n);
        step_tile(s, AdamTile{adam}, at, n, tile.first, tile.second, tile);
        encode(tile.first, tile.second, s.codes[0] + at, s.codes[1] + at, s.exponents[0][block], s.exponents[1][block],
               n, static_cast<uint32_t>(at), key);
    }
    finish_stores();
}

void adam(const Stretch& s, const Adam& c, int64_t begin, int64_t end) {
    if (s.codes[0]) {
        step_adam8(s, c, begin, end);
    } else {
        step(s, AdamTile{c}, begin, end);
    }
}

void sgd(const Stretch& s, const Sgd& c, int64_t begin, int64_t end) {
    if (s.state[0]) {
        step(s, SgdTile<true>{c}, begin, end);
    } else {
        step(s, SgdTile<false>{c}, begin, end);
    }
}

void adagrad(const Stretch& s, const Adagrad& c, int64_t begin, int64_t end) { step(s, AdagradTile{c}, begin, end); }

void lion(const Stretch& s, const Lion& c, int64_t begin, int64_t end) { step(s, LionTile{c}, begin, end); }

// --- the rest ---

// Sixteen sums, whatever the instruction set, so that all give the same bits. The square of an fp32 number is exact in
// double, and none is too large for it: an infinite sum means an infinite element.
double sum_of_squares(const void* data, Number number, int64_t begin, int64_t end) {
    constexpr int64_t LANES = 16;
    double sums[LANES] = {};
    alignas(LINE) float tile[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int64_t n = end - at < BLOCK ? end - at : BLOCK;
        const float* values = static_cast<const float*>(data) + at;
        if (number != Number::fp32 || n < BLOCK) {
            widen(data, number, at, n, 1.0f, tile);
            for (int64_t i = n; i % LANES != 0; ++i) tile[i] = 0.0f;
            values = tile;
        }
        for (int64_t i = 0; i < n; i += LANES) {
#pragma omp simd
            for (int64_t lane = 0; lane < LANES; ++lane) {
                const double value = values[i + lane];
                sums[lane] += value * value;
            }
        }
    }
    double sum = 0.0;
    for (const double part : sums) sum += part;
    return sum;
}

void stream(float* out, const float* first, const float* second, int64_t begin, int64_t end) {
    alignas(LINE) float tile[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int64_t n = end - at < BLOCK ? end - at : BLOCK;
        const float* source = first + at;
        if (out == first) {
#pragma omp simd
            for (int64_t i = at; i < at + n; ++i) out[i] *= 3.0f;
            continue;
        }
        if (second) {
            const float* other = second + at;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) tile[i] = source[i] + 3.0f * other[i];
            source = tile;
        }
        copy_past_cache(reinterpret_cast<uint8_t*>(out + at), reinterpret_cast<const uint8_t*>(source), n * 4);
    }
    finish_stores();
}

}  // namespace

#define TABLE_OF(isa) isa##_kernels
#define TABLE(isa) TABLE_OF(isa)
extern const Kernels TABLE(SHARDWELL_ISA) = {adam, sgd, adagrad, lion, sum_of_squares, narrow_bf16, crc32, stream};

}  // namespace shardwell
