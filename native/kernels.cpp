// The kernels, written once as plain loops and compiled for each instruction set (SHARDWELL_ISA names it).
//
// A stretch is walked in tiles that stay in the first-level cache: widen the gradient, update master and state, narrow
// the result. Memory is read and written once; what does not stay in place is written past the caches.
//
// Operations stand in the order of torch's on CUDA, and a product and a sum are one operation (std::fma) where they are
// there: from the same numbers, a step gives torch's bits. Compilers fuse nothing else. So all instruction sets give
// the same bits as well, and so does src/shardwell/kernels/reference.py.

#include "kernels.h"

#include <cmath>

#include "codec.h"
#include "crc.h"
#include "moments8.h"
#include "numbers.h"

namespace shardwell {
namespace {

constexpr int64_t TILE = 128;  // measured: 256 and 64 are 7 % and 4 % slower

struct Tile {
    alignas(LINE) float gradient[BLOCK];
    alignas(LINE) float master[BLOCK];
    alignas(LINE) float state[2][BLOCK];
    alignas(LINE) uint16_t out[BLOCK];
    alignas(LINE) int16_t low[BLOCK];
    alignas(LINE) uint8_t codes[2][BLOCK];
};

// A part of an array: where it is read, and where its new values are left. That may be the same.
struct Part {
    const float* from;
    float* to;
};

// --- the rules: one loop each over a tile ---

// As torch.lerp: from the nearer end.
inline float lerp(float from, float to, float weight) {
    const float difference = to - from;
    return weight < 0.5f ? std::fma(weight, difference, from) : std::fma(weight - 1.0f, difference, to);
}

// The gradient with coupled weight decay, which 0 turns off.
inline float coupled(float gradient, float master, float weight) {
    return weight != 0.0f ? std::fma(weight, master, gradient) : gradient;
}

inline float sign(float value) { return static_cast<float>(value > 0.0f) - static_cast<float>(value < 0.0f); }

template <Like like>
struct AdamTile {
    const Adam& c;

    void operator()(Part p, const float* gradient, Part m, Part v, int64_t n) const {
        const Adam a = c;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float g = coupled(gradient[i], p.from[i], a.coupled);
            const float first = like == Like::cuda_fused ? std::fma(a.beta1, m.from[i], std::fma(-a.beta1, g, g))
                                                         : lerp(m.from[i], g, a.weight1);
            const float second = squares(a, v.from[i], g);
            const float denominator = std::sqrt(second) / a.root + a.eps;
            const float old = like == Like::cuda_fused ? std::fma(a.decay, p.from[i], p.from[i]) : a.decay * p.from[i];
            p.to[i] = like == Like::cuda ? std::fma(a.step_size, first / denominator, old)
                                         : old + a.step_size * first / denominator;
            m.to[i] = first;
            v.to[i] = second;
        }
    }

    static float squares(const Adam& a, float v, float g) {
        if (like == Like::cuda_fused) return std::fma(a.beta2, v, std::fma(-a.beta2, g * g, g * g));
        return like == Like::cuda ? std::fma(a.weight2, g * g, a.beta2 * v) : std::fma(a.weight2 * g, g, a.beta2 * v);
    }
};

template <bool with_momentum>
struct SgdTile {
    const Sgd& c;

    void operator()(Part p, const float* gradient, Part momentum, Part, int64_t n) const {
        const Sgd a = c;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            float g = coupled(gradient[i], p.from[i], a.coupled);
            if (with_momentum) {
                const float moved = a.first ? g : std::fma(a.weight, g, a.momentum * momentum.from[i]);
                g = a.nesterov ? std::fma(a.momentum, moved, g) : moved;
                momentum.to[i] = moved;
            }
            p.to[i] = std::fma(a.rate, g, p.from[i]);
        }
    }
};

struct AdagradTile {
    const Adagrad& c;

    void operator()(Part p, const float* gradient, Part sum, Part, int64_t n) const {
        const Adagrad a = c;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float g = coupled(gradient[i], p.from[i], a.coupled);
            const float total = std::fma(g, g, sum.from[i]);
            p.to[i] = p.from[i] + a.rate * g / (std::sqrt(total) + a.eps);
            sum.to[i] = total;
        }
    }
};

struct LionTile {
    const Lion& c;

    void operator()(Part p, const float* g, Part momentum, Part, int64_t n) const {
        const Lion a = c;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float old = momentum.from[i];
            const float direction = sign(lerp(old, g[i], a.weight1));
            p.to[i] = a.decay * p.from[i] + a.rate * direction;
            momentum.to[i] = lerp(old, g[i], a.weight2);
        }
    }
};

// --- walking a stretch ---

template <class Element>
inline void put(Element* to, const Element* room, int64_t n) {
    copy_past_cache(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(room),
                    n * static_cast<int64_t>(sizeof(Element)));
}

inline void write_out(const Stretch& s, int64_t at, int64_t n, const float* master, uint16_t* room) {
    if (s.out_type == Number::bf16) {
        narrow_bf16(master, room, n);
    } else {
        narrow_fp16(master, room, n);
    }
    put(s.out + at, room, n);
}

// Elements [at, ...) of an array. What does not stay in place is left in `room` first, to be put past the caches.
inline Part part_of(const float* from, float* to, int64_t at, float* room) {
    if (!from) return {nullptr, nullptr};
    return {from + at, from == to ? to + at : room};
}

inline Part read_master(const Stretch& s, int64_t at, int64_t n, Tile& tile) {
    if (s.old.master) return part_of(s.old.master, s.now.master, at, tile.master);
    join(s.old.high + at, s.old.low + at, tile.master, n);
    return {tile.master, tile.master};
}

inline void write_master(const Stretch& s, int64_t at, int64_t n, Tile& tile) {
    if (s.now.master) {
        if (s.now.master != s.old.master) put(s.now.master + at, tile.master, n);
    } else if (s.now.high == s.old.high) {
        split(tile.master, s.now.high + at, s.now.low + at, n);
    } else {
        split(tile.master, tile.out, tile.low, n);
        put(s.now.high + at, tile.out, n);
        put(s.now.low + at, tile.low, n);
    }
}

// One tile: `first` and `second` are its state, wherever that is.
template <class Rule>
inline void step_tile(const Stretch& s, const Rule& rule, int64_t at, int64_t n, Part first, Part second, Tile& tile) {
    widen(s.gradient, s.gradient_type, at, n, s.factor, tile.gradient);
    const Part master = read_master(s, at, n, tile);
    rule(master, tile.gradient, first, second, n);
    write_master(s, at, n, tile);
    if (s.out) write_out(s, at, n, master.to, tile.out);
}

// How many elements there are up to the next cache line of what is put past the caches.
inline int64_t elements_to_next_line(const Stretch& s, int64_t at) {
    if (s.out) return to_next_line(s.out + at) / 2;
    return s.now.master ? to_next_line(s.now.master + at) / 4 : to_next_line(s.now.high + at) / 2;
}

template <class Rule>
void step(const Stretch& s, const Rule& rule, int64_t begin, int64_t end) {
    Tile tile;
    // The first tile ends where a cache line begins, so that all others write whole lines.
    int64_t n = elements_to_next_line(s, begin);
    for (int64_t at = begin; at < end; at += n, n = TILE) {
        if (n == 0 || n > end - at) n = end - at < TILE ? end - at : TILE;
        const Part first = part_of(s.old.state[0], s.now.state[0], at, tile.state[0]);
        const Part second = part_of(s.old.state[1], s.now.state[1], at, tile.state[1]);
        step_tile(s, rule, at, n, first, second, tile);
        for (int i = 0; i < 2; ++i) {
            if (s.now.state[i] != s.old.state[i]) put(s.now.state[i] + at, tile.state[i], n);
        }
    }
    finish_stores();
}

// Here a tile is a block.
template <class Rule>
void step8(const Stretch& s, const Rule& rule, int64_t begin, int64_t end) {
    Tile tile;
    const uint32_t key = hash(s.seed);
    const Part first = {tile.state[0], tile.state[0]}, second = {tile.state[1], tile.state[1]};
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int64_t n = end - at < BLOCK ? end - at : BLOCK, block = at / BLOCK;
        decode1(s.old.codes[0] + at, s.old.exponents[0][block], tile.state[0], n);
        decode2(s.old.codes[1] + at, s.old.exponents[1][block], tile.state[1], n);
        step_tile(s, rule, at, n, first, second, tile);
        encode(first.to, second.to, tile.codes[0], tile.codes[1], s.now.exponents[0][block], s.now.exponents[1][block],
               n, static_cast<uint32_t>(at), key);
        for (int i = 0; i < 2; ++i) put(s.now.codes[i] + at, tile.codes[i], n);
    }
    finish_stores();
}

template <Like like>
void adam_like(const Stretch& s, const Adam& c, int64_t begin, int64_t end) {
    if (s.old.codes[0]) {
        step8(s, AdamTile<like>{c}, begin, end);
    } else {
        step(s, AdamTile<like>{c}, begin, end);
    }
}

void adam(const Stretch& s, const Adam& c, int64_t begin, int64_t end) {
    if (c.like == Like::cuda) {
        adam_like<Like::cuda>(s, c, begin, end);
    } else if (c.like == Like::cuda_fused) {
        adam_like<Like::cuda_fused>(s, c, begin, end);
    } else {
        adam_like<Like::cpu>(s, c, begin, end);
    }
}

void sgd(const Stretch& s, const Sgd& c, int64_t begin, int64_t end) {
    if (s.old.state[0]) {
        step(s, SgdTile<true>{c}, begin, end);
    } else {
        step(s, SgdTile<false>{c}, begin, end);
    }
}

void adagrad(const Stretch& s, const Adagrad& c, int64_t begin, int64_t end) { step(s, AdagradTile{c}, begin, end); }

void lion(const Stretch& s, const Lion& c, int64_t begin, int64_t end) { step(s, LionTile{c}, begin, end); }

// --- the rest ---

void add(float* total, const void* gradient, Number number, float factor, bool fresh, int64_t begin, int64_t end) {
    alignas(LINE) float tile[TILE];
    int64_t n = to_next_line(total + begin) / 4;  // as in step
    for (int64_t at = begin; at < end; at += n, n = TILE) {
        if (n == 0 || n > end - at) n = end - at < TILE ? end - at : TILE;
        widen(gradient, number, at, n, factor, tile);
        if (fresh) {
            put(total + at, tile, n);
            continue;
        }
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) total[at + i] += tile[i];
    }
    finish_stores();
}

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
extern const Kernels TABLE(SHARDWELL_ISA) = {adam,        sgd,   adagrad,     lion,        add,         sum_of_squares,
                                             narrow_bf16, crc32, encode_rows, decode_rows, sum_of_rows, stream};

}  // namespace shardwell
