// Requests, the blocks that they are cut into, and the lanes in which blocks wait for a thread.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "io.h"

namespace shardwell::io {

struct Request {
    std::shared_ptr<std::atomic<int64_t>> completed;  // the queue's
    std::mutex mutex;
    std::condition_variable changed;
    int64_t left = 0;  // blocks
    const std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
    bool is_forgotten = false;
    Outcome outcome{};

    void end(int32_t error, int32_t part, int64_t offset) {
        completed->fetch_add(1, std::memory_order_relaxed);
        bool is_mine;
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (error != 0 && outcome.error == 0) {
                outcome.error = error;
                outcome.part = part;
                outcome.offset = offset;
            }
            left -= 1;
            if (left == 0) {
                outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
                changed.notify_all();
            }
            is_mine = left == 0 && is_forgotten;
        }
        if (is_mine) delete this;
    }
};

struct Free {
    void operator()(char* page) const { std::free(page); }
};
using Page = std::unique_ptr<char, Free>;

// One read or write. The end of a request that is no multiple of SECTOR goes through a page.
struct Block {
    Request* request;
    char* address;
    int64_t offset;
    int64_t size;
    int32_t file;
    int32_t part;
    bool is_write;
    Page page;
    char* tail;  // in the caller's memory
    int64_t tail_size;

    // Takes note of what the system says of it; true if there is more to do.
    bool advance(int64_t result) {
        if (result == -EINTR || result == -EAGAIN) return true;
        if (result >= size) return end(0);
        if (result < 0) return end(static_cast<int32_t>(-result));
        const int64_t moved = result / 512 * 512;  // what a sector is to the least of drives
        if (moved == 0) return end(ENDED_EARLY);
        address += moved;
        offset += moved;
        size -= moved;
        return true;
    }

    bool end(int32_t error) {
        if (error == 0 && page && !is_write) std::memcpy(tail, page.get(), static_cast<size_t>(tail_size));
        page.reset();
        request->end(error, part, offset);
        return false;
    }

    int64_t move_now() const {
        const auto length = static_cast<size_t>(size);
        const ssize_t result = is_write ? pwrite(file, address, length, offset) : pread(file, address, length, offset);
        return result < 0 ? -errno : result;
    }
};

inline void cut(const Part& part, int32_t index, bool is_write, int64_t size, Request* request, std::vector<Block>& blocks) {
    const int64_t whole = part.size / SECTOR * SECTOR;
    char* const address = static_cast<char*>(part.address);
    for (int64_t at = 0; at < whole; at += size) {
        blocks.push_back(Block{request, address + at, part.offset + at, std::min(size, whole - at), part.file, index,
                               is_write, nullptr, nullptr, 0});
    }
    if (whole == part.size) return;
    Page page(static_cast<char*>(std::aligned_alloc(SECTOR, SECTOR)));
    if (!page) throw std::bad_alloc();
    char* const start = page.get();
    std::memset(start, 0, SECTOR);
    if (is_write) std::memcpy(start, address + whole, static_cast<size_t>(part.size - whole));
    blocks.push_back(Block{request, start, part.offset + whole, SECTOR, part.file, index, is_write, std::move(page),
                           address + whole, part.size - whole});
}

// Blocks that wait, and how those who take them are told. Reads and writes take turns where both wait: a drive that does
// both at once moves more than one that does them one after the other.
class Lane {
  public:
    void put(std::vector<Block>& blocks, bool is_write, bool is_urgent) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            auto& waiting = is_write ? writes_ : is_urgent ? urgent_ : reads_;
            for (Block& block : blocks) waiting.push_back(std::move(block));
        }
        wake();
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_stopped_ = true;
        }
        wake();
    }

    bool take(Block& block) {
        std::lock_guard<std::mutex> lock(mutex_);
        return pop(block);
    }

    // Blocks the thread; false if there will be no more.
    bool await(Block& block) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return is_stopped_ || !is_empty(); });
        return pop(block);
    }

    bool is_over() {
        std::lock_guard<std::mutex> lock(mutex_);
        return is_stopped_ && is_empty();
    }

    void add_bell(int bell) { bells_.push_back(bell); }  // an eventfd; before the first block is put

  private:
    bool is_empty() const { return urgent_.empty() && reads_.empty() && writes_.empty(); }

    bool pop(Block& block) {
        if (is_empty()) return false;
        auto& reads = urgent_.empty() ? reads_ : urgent_;
        wrote_last_ = reads.empty() || (!writes_.empty() && !wrote_last_);
        auto& waiting = wrote_last_ ? writes_ : reads;
        block = std::move(waiting.front());
        waiting.pop_front();
        return true;
    }

    void wake() {
        changed_.notify_all();
        const uint64_t one = 1;
        for (const int bell : bells_) {
            while (write(bell, &one, sizeof one) < 0 && errno == EINTR) {
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Block> urgent_, reads_, writes_;
    bool wrote_last_ = false;
    std::vector<int> bells_;
    bool is_stopped_ = false;
};

}  // namespace shardwell::io
