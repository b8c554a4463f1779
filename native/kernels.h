// One set of kernels for each instruction set: kernels.cpp is compiled once for each, into a table.
#pragma once

#include "shardwell_native.h"

namespace shardwell {

// Each works on the elements [begin, end) of a stretch, in the calling thread. With 8-bit moments `begin` is a multiple
// of BLOCK.
struct Kernels {
    void (*adam)(const Stretch&, const Adam&, int64_t begin, int64_t end);
    void (*sgd)(const Stretch&, const Sgd&, int64_t begin, int64_t end);
    void (*adagrad)(const Stretch&, const Adagrad&, int64_t begin, int64_t end);
    void (*lion)(const Stretch&, const Lion&, int64_t begin, int64_t end);
    void (*add)(float* total, const void* gradient, Number number, float factor, bool fresh, int64_t begin,
                int64_t end);
    double (*sum_of_squares)(const void* data, Number number, int64_t begin, int64_t end);
    void (*to_bf16)(const float* source, uint16_t* out, int64_t numel);
    uint32_t (*crc32)(uint32_t value, const uint8_t* data, int64_t num_bytes);
    // Of the blocks [begin, end), counted through all rows.
    void (*encode)(const Coded&, int64_t begin, int64_t end);
    void (*decode)(const Coded&, int64_t begin, int64_t end);
    void (*decode_sum)(const Coded&, int64_t begin, int64_t end);
    void (*stream)(float* out, const float* first, const float* second, int64_t begin, int64_t end);
};

extern const Kernels scalar_kernels;
#if defined(SHARDWELL_X86)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

}  // namespace shardwell
