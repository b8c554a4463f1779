// The entry points: which instruction set, and which thread does which part.

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <vector>

#include "kernels.h"
#include "polynomials.h"

namespace shardwell {
namespace {

// Parts of a stretch that threads take one after the other. A multiple of BLOCK; sums over parts do not depend on the
// number of threads.
constexpr int64_t PART = 1 << 16;

// Bytes of one read from a file, so few that they are in the cache for their checksum.
constexpr int64_t LARGE_READ = 1 << 18, SMALL_READ = 1 << 16;

const Kernels& kernels_for(int32_t isa) {
#if defined(SHARDWELL_X86)
    if (isa == static_cast<int32_t>(Isa::avx512)) return avx512_kernels;
    if (isa == static_cast<int32_t>(Isa::avx2)) return avx2_kernels;
#endif
    (void)isa;
    return scalar_kernels;
}

// Calls work(part, begin, end) for all parts of [0, numel).
template <class Work>
void in_parts(int64_t numel, int32_t threads, const Work& work) {
    const int64_t parts = (numel + PART - 1) / PART;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && parts > 1)
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = part * PART;
        work(part, begin, numel - begin < PART ? numel : begin + PART);
    }
}

template <class Rule>
void step(void (*kernel)(const Stretch&, const Rule&, int64_t, int64_t), const Stretch& stretch, const Rule& rule,
          int32_t threads) {
    in_parts(stretch.numel, threads, [&](int64_t, int64_t begin, int64_t end) { kernel(stretch, rule, begin, end); });
}

void code(void (*kernel)(const Coded&, int64_t, int64_t), const Coded& rows, int32_t threads) {
    const int64_t blocks = rows.outer * rows.inner * ((rows.numel + BLOCK - 1) / BLOCK);
    in_parts(blocks * BLOCK, threads,
             [&](int64_t, int64_t begin, int64_t end) { kernel(rows, begin / BLOCK, end / BLOCK); });
}

// Writes a checksum, big-endian, and returns where the next one goes.
uint8_t* put(uint32_t sum, uint8_t* sums) {
    for (int shift = 24; shift >= 0; shift -= 8) *sums++ = static_cast<uint8_t>(sum >> shift);
    return sums;
}

}  // namespace
}  // namespace shardwell

using namespace shardwell;

int32_t shardwell_abi_version() { return ABI_VERSION; }

int32_t shardwell_isa() {
#if defined(SHARDWELL_X86)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("pclmul");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx2 && avx512) return static_cast<int32_t>(Isa::avx512);
    if (avx2) return static_cast<int32_t>(Isa::avx2);
#endif
    return static_cast<int32_t>(Isa::scalar);
}

void shardwell_adam(const Stretch* stretch, const Adam* rule, int32_t isa, int32_t threads) {
    step(kernels_for(isa).adam, *stretch, *rule, threads);
}

void shardwell_sgd(const Stretch* stretch, const Sgd* rule, int32_t isa, int32_t threads) {
    step(kernels_for(isa).sgd, *stretch, *rule, threads);
}

void shardwell_adagrad(const Stretch* stretch, const Adagrad* rule, int32_t isa, int32_t threads) {
    step(kernels_for(isa).adagrad, *stretch, *rule, threads);
}

void shardwell_lion(const Stretch* stretch, const Lion* rule, int32_t isa, int32_t threads) {
    step(kernels_for(isa).lion, *stretch, *rule, threads);
}

void shardwell_add(float* total, const void* gradient, int32_t number, float factor, int32_t fresh, int64_t numel,
                   int32_t isa, int32_t threads) {
    in_parts(numel, threads, [&](int64_t, int64_t begin, int64_t end) {
        kernels_for(isa).add(total, gradient, static_cast<Number>(number), factor, fresh != 0, begin, end);
    });
}

double shardwell_sum_of_squares(const void* data, int32_t number, int64_t numel, int32_t isa, int32_t threads) {
    std::vector<double> sums(static_cast<size_t>((numel + PART - 1) / PART));
    in_parts(numel, threads, [&](int64_t part, int64_t begin, int64_t end) {
        sums[static_cast<size_t>(part)] =
            kernels_for(isa).sum_of_squares(data, static_cast<Number>(number), begin, end);
    });
    double sum = 0.0;
    for (const double part : sums) sum += part;
    return sum;
}

void shardwell_to_bf16(const float* source, uint16_t* out, int64_t numel, int32_t isa, int32_t threads) {
    in_parts(numel, threads, [&](int64_t, int64_t begin, int64_t end) {
        kernels_for(isa).to_bf16(source + begin, out + begin, end - begin);
    });
}

uint32_t shardwell_crc32(uint32_t value, const void* data, int64_t num_bytes, int32_t isa) {
    return kernels_for(isa).crc32(value, static_cast<const uint8_t*>(data), num_bytes);
}

uint32_t shardwell_crc32_blocks(uint32_t value, const void* data, int64_t num_bytes, int64_t block, uint8_t* sums,
                                int32_t isa) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    const Kernels& kernels = kernels_for(isa);
    const uint32_t by_a_block = power_of_bytes(block);
    for (; num_bytes > 0; bytes += block, num_bytes -= block) {
        const int64_t length = num_bytes < block ? num_bytes : block;
        const uint32_t sum = kernels.crc32(0, bytes, length);
        value = product(value, length == block ? by_a_block : power_of_bytes(length)) ^ sum;
        sums = put(sum, sums);
    }
    return value;
}

int64_t shardwell_read_blocks(int32_t file, int64_t offset, int64_t before, void* data, int64_t num_bytes, int64_t after,
                              int64_t block, uint32_t value, uint8_t* sums, int32_t isa) {
    const Kernels& kernels = kernels_for(isa);
    const int64_t end = before + num_bytes, total = end + after;
    uint8_t unwanted[SMALL_READ];
    int64_t reached = 0, left = block;  // bytes that were read, and bytes that the block lacks
    while (reached < total) {
        const bool is_wanted = reached >= before && reached < end;
        const int64_t rest = (reached < before ? before : is_wanted ? end : total) - reached;
        uint8_t* place = is_wanted ? static_cast<uint8_t*>(data) + (reached - before) : unwanted;
        const int64_t most = is_wanted ? LARGE_READ : SMALL_READ;
        const ssize_t found = pread(file, place, static_cast<size_t>(rest < most ? rest : most), offset + reached);
        if (found < 0 && errno == EINTR) continue;
        if (found < 0) return -static_cast<int64_t>(errno);
        if (found == 0) return reached;
        for (int64_t at = 0; at < found;) {
            const int64_t length = found - at < left ? found - at : left;
            value = kernels.crc32(value, place + at, length);
            at += length;
            left -= length;
            if (left == 0) {
                sums = put(value, sums);
                value = 0;
                left = block;
            }
        }
        reached += found;
    }
    if (left < block) put(value, sums);
    return total;
}

uint32_t shardwell_crc32_combine(uint32_t first, uint32_t second, int64_t num_bytes) {
    return product(first, power_of_bytes(num_bytes)) ^ second;
}

void shardwell_encode(const Coded* rows, int32_t isa, int32_t threads) {
    code(kernels_for(isa).encode, *rows, threads);
}

void shardwell_decode(const Coded* rows, int32_t isa, int32_t threads) {
    code(kernels_for(isa).decode, *rows, threads);
}

void shardwell_decode_sum(const Coded* rows, int32_t isa, int32_t threads) {
    code(kernels_for(isa).decode_sum, *rows, threads);
}

void shardwell_stream(float* out, const float* first, const float* second, int64_t numel, int32_t isa,
                      int32_t threads) {
    in_parts(numel, threads,
             [&](int64_t, int64_t begin, int64_t end) { kernels_for(isa).stream(out, first, second, begin, end); });
}
