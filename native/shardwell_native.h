// The C interface of the library. src/shardwell/kernels/library.py mirrors it field by field; whoever changes a
// structure or a signature raises ABI_VERSION here and there.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define SHARDWELL_EXPORT __attribute__((visibility("default")))
#else
#define SHARDWELL_EXPORT
#endif

namespace shardwell {

constexpr int32_t ABI_VERSION = 8;
constexpr int64_t BLOCK = 256;  // elements that share the exponents of their 8-bit moments, or the scale of their codes

enum class Isa : int32_t { scalar = 0, avx2 = 1, avx512 = 2 };
enum class Number : int32_t { none = 0, fp32 = 1, bf16 = 2, fp16 = 3 };
// Whose roundings Adam has: torch's foreach operations on CUDA, its fused kernel there, or its operations on the CPU.
enum class Like : int32_t { cuda = 0, cuda_fused = 1, cpu = 2 };

enum class Kind : int32_t { int8 = 0, int4 = 1, fp8 = 2 };

// A master and its state. A pointer that a call does not need is null.
struct Slot {
    float* master;   // or null: then the master is high and low, as src/shardwell/kernels/rounding.py splits it
    uint16_t* high;  // bf16
    int16_t* low;
    float* state[2];        // Adam: first and second moment; SGD: momentum; Adagrad: sum; Lion: momentum
    uint8_t* codes[2];      // Adam with 8-bit moments, in place of state: one code an element,
    uint8_t* exponents[2];  // one exponent a block
};

// What one call reads and writes, element by element.
struct Stretch {
    int64_t numel;
    const void* gradient;
    Slot old;
    Slot now;       // `old` again, or other memory: then `old` is only read
    uint16_t* out;  // the updated parameter in 16 bits, somewhere else, or null
    Number gradient_type;
    Number out_type;
    float factor;   // the gradient is multiplied by it first
    uint32_t seed;  // of the rounding of 8-bit moments
};

// The coefficients of a step. The host computes them in double and rounds them once.
struct Adam {
    float beta1;
    float weight1;  // 1 - beta1
    float beta2;
    float weight2;    // 1 - beta2
    float step_size;  // -lr / (1 - beta1^t)
    float root;       // sqrt(1 - beta2^t)
    float eps;
    float decay;    // AdamW: the master is multiplied by it, 1 - lr * weight_decay; like cuda_fused, by 1 + it
    float coupled;  // times the master is added to the gradient: weight_decay (Adam); 0 is off
    Like like;
};

struct Sgd {
    float rate;      // -lr
    float momentum;  // 0 is off, and there is no state
    float weight;    // 1 - dampening
    float coupled;
    int32_t nesterov;
    int32_t first;  // the momentum becomes the gradient
};

struct Adagrad {
    float rate;  // -lr / (1 + (t - 1) * lr_decay)
    float eps;
    float coupled;
};

struct Lion {
    float weight1;
    float weight2;
    float rate;  // -lr
    float decay;
};

// Rows of numbers and their codes (src/shardwell/kernels/quantized_format.py says in which form), along two dimensions. Strides of
// numbers count elements, those of codes bytes.
struct Coded {
    int64_t outer;
    int64_t inner;
    int64_t numel;  // of a row
    void* values;
    int64_t value_strides[2];
    uint8_t* data;
    int64_t data_strides[2];
    int64_t num_messages;  // for decode_sum
    int64_t message_stride;
    Number number;
    Kind kind;
    float factor;
    int32_t add;
};

}  // namespace shardwell

extern "C" {
SHARDWELL_EXPORT int32_t shardwell_abi_version();
// The best instruction set that this machine has.
SHARDWELL_EXPORT int32_t shardwell_isa();
SHARDWELL_EXPORT void shardwell_adam(const shardwell::Stretch*, const shardwell::Adam*, int32_t isa, int32_t threads);
SHARDWELL_EXPORT void shardwell_sgd(const shardwell::Stretch*, const shardwell::Sgd*, int32_t isa, int32_t threads);
SHARDWELL_EXPORT void shardwell_adagrad(const shardwell::Stretch*, const shardwell::Adagrad*, int32_t isa,
                                        int32_t threads);
SHARDWELL_EXPORT void shardwell_lion(const shardwell::Stretch*, const shardwell::Lion*, int32_t isa, int32_t threads);
// total += factor * gradient, or total = factor * gradient if it is fresh.
SHARDWELL_EXPORT void shardwell_add(float* total, const void* gradient, int32_t number, float factor, int32_t fresh,
                                    int64_t numel, int32_t isa, int32_t threads);
SHARDWELL_EXPORT double shardwell_sum_of_squares(const void* data, int32_t number, int64_t numel, int32_t isa,
                                                 int32_t threads);
SHARDWELL_EXPORT void shardwell_to_bf16(const float* source, uint16_t* out, int64_t numel, int32_t isa,
                                        int32_t threads);
SHARDWELL_EXPORT uint32_t shardwell_crc32(uint32_t value, const void* data, int64_t num_bytes, int32_t isa);
// The same, and in `sums` those of the blocks, each in four bytes, big-endian; the last block may be shorter.
SHARDWELL_EXPORT uint32_t shardwell_crc32_blocks(uint32_t value, const void* data, int64_t num_bytes, int64_t block,
                                                 uint8_t* sums, int32_t isa);
// Reads `before + num_bytes + after` bytes of a file from `offset` on, of which `data` gets those in the middle, and writes
// the checksums of the blocks of all of them to `sums`. The first one goes on from `value`. Returns the bytes that were
// read, fewer where the file ends, or -errno.
SHARDWELL_EXPORT int64_t shardwell_read_blocks(int32_t file, int64_t offset, int64_t before, void* data,
                                               int64_t num_bytes, int64_t after, int64_t block, uint32_t value,
                                               uint8_t* sums, int32_t isa);
// That of bytes with the checksum `first` and `num_bytes` bytes with the checksum `second` after them.
SHARDWELL_EXPORT uint32_t shardwell_crc32_combine(uint32_t first, uint32_t second, int64_t num_bytes);
SHARDWELL_EXPORT void shardwell_encode(const shardwell::Coded*, int32_t isa, int32_t threads);
SHARDWELL_EXPORT void shardwell_decode(const shardwell::Coded*, int32_t isa, int32_t threads);
// values = factor * the sum of all messages, in fp32 and in their order; or that is added to them.
SHARDWELL_EXPORT void shardwell_decode_sum(const shardwell::Coded*, int32_t isa, int32_t threads);
// What memory can do: out = first, out = first + 3 * second, or out *= 3 where out and first are the same.
SHARDWELL_EXPORT void shardwell_stream(float* out, const float* first, const float* second, int64_t numel, int32_t isa,
                                       int32_t threads);
}
