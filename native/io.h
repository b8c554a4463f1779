// Reads and writes of files, many at once, beside the caller: the C interface of io.cpp. src/shardwell/kernels/io.py
// mirrors it field by field; whoever changes a structure or a signature raises IO_VERSION here and there.
#pragma once

#include <cstdint>

#include "shardwell_native.h"

namespace shardwell::io {

constexpr int32_t IO_VERSION = 3;
constexpr int64_t SECTOR = 4096;     // addresses, offsets and sizes of what is read or written are multiples of it
constexpr int32_t ENDED_EARLY = -1;  // an error beside errno's: fewer bytes moved than were asked for

enum class Engine : int32_t { threads = 0, io_uring = 1 };

struct Shape {
    int64_t block;  // bytes of one read or write
    Engine engine;
    int32_t lanes;           // queues that do not wait for one another: one for each drive
    int32_t depth;           // blocks in flight at once, for each ring of each lane
    int32_t parallelism;     // rings of each lane, each with a thread; without io_uring, depth * parallelism threads
    int32_t single_submit;   // io_uring: a system call for each block
    int32_t overlap_events;  // io_uring: a new block for each one that ends; else all of a batch end first
};

// Bytes that are contiguous in a file and in memory. Address and offset are multiples of SECTOR; the size need not be:
// then the file is read or written up to the next multiple of it, and the memory is not.
struct Part {
    int64_t offset;
    void* address;
    int64_t size;
    int32_t file;  // a descriptor
    int32_t lane;
};

struct Outcome {
    int64_t offset;     // of the block that failed, in its file
    int64_t completed;  // blocks of any request that the queue has ended so far: while it grows, the queue is alive
    int32_t error;      // 0, errno or ENDED_EARLY
    int32_t part;       // that failed
    double seconds;     // from when it was submitted until it was done
};

}  // namespace shardwell::io

extern "C" {
SHARDWELL_EXPORT int32_t shardwell_io_version();
// 0 if this process may use io_uring, else errno.
SHARDWELL_EXPORT int32_t shardwell_io_uring();
// Null, and errno in `error`, if there is no such queue to be had.
SHARDWELL_EXPORT void* shardwell_io_open(const shardwell::io::Shape*, int32_t* error);
// Begins to read or write. Null if memory is short; else the memory of the parts must stay until the request is done.
// What is urgent comes before reads that are not.
SHARDWELL_EXPORT void* shardwell_io_submit(void* queue, int32_t is_write, int32_t is_urgent, const shardwell::io::Part*,
                                           int32_t num_parts);
// 1 if the request is done, at the latest after so many milliseconds, else 0.
SHARDWELL_EXPORT int32_t shardwell_io_wait(void* request, int64_t milliseconds, shardwell::io::Outcome*);
// The last word about a request, done or not.
SHARDWELL_EXPORT void shardwell_io_forget(void* request);
// Waits for all that was submitted.
SHARDWELL_EXPORT void shardwell_io_close(void* queue);
}
