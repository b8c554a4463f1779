// Queues of reads and writes. A request is cut into blocks; the threads of a lane take them, reads and writes by turns.
// With io_uring a thread keeps many blocks in flight in a ring of its own, without it a thread has one block at a time.

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <system_error>
#include <thread>

#include "io_ring.h"

namespace shardwell::io {
namespace {

void serve(Lane* lane) {
    Block block{};
    while (lane->await(block)) {
        while (block.advance(block.move_now())) {
        }
    }
}

// Signals are for the threads of the program.
class WithoutSignals {
  public:
    WithoutSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    WithoutSignals(const WithoutSignals&) = delete;
    WithoutSignals& operator=(const WithoutSignals&) = delete;

  private:
    sigset_t before_;
};

class Queue {
  public:
    explicit Queue(const Shape& shape) : shape_(shape), lanes_(static_cast<size_t>(shape.lanes)) {
        const WithoutSignals masked;
        try {
            for (Lane& lane : lanes_) start(lane);
        } catch (...) {
            stop();
            throw;
        }
    }

    ~Queue() { stop(); }
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    Request* submit(bool is_write, bool is_urgent, const Part* parts, int32_t num_parts) {
        std::vector<std::vector<Block>> blocks(lanes_.size());
        auto request = std::make_unique<Request>();
        for (int32_t index = 0; index < num_parts; ++index) {
            const Part& part = parts[index];
            cut(part, index, is_write, shape_.block, request.get(), blocks[static_cast<size_t>(part.lane)]);
        }
        request->completed = completed_;
        for (const auto& mine : blocks) request->left += static_cast<int64_t>(mine.size());
        for (size_t lane = 0; lane < lanes_.size(); ++lane) {
            if (!blocks[lane].empty()) lanes_[lane].put(blocks[lane], is_write, is_urgent);
        }
        return request.release();
    }

  private:
    void start(Lane& lane) {
        if (shape_.engine == Engine::threads) {
            for (int32_t i = 0; i < shape_.depth * shape_.parallelism; ++i) threads_.emplace_back(serve, &lane);
            return;
        }
        for (int32_t i = 0; i < shape_.parallelism; ++i) {
            rings_.push_back(std::make_unique<Ring>(&lane, shape_));
            Ring* const ring = rings_.back().get();
            if (ring->error() != 0) throw std::system_error(ring->error(), std::generic_category());
            threads_.emplace_back([ring] { ring->serve(); });
        }
    }

    void stop() {
        for (Lane& lane : lanes_) lane.stop();
        for (std::thread& thread : threads_) thread.join();
    }

    Shape shape_;
    std::shared_ptr<std::atomic<int64_t>> completed_ = std::make_shared<std::atomic<int64_t>>(0);
    std::vector<Lane> lanes_;
    std::vector<std::unique_ptr<Ring>> rings_;
    std::vector<std::thread> threads_;
};

}  // namespace
}  // namespace shardwell::io

using namespace shardwell::io;

int32_t shardwell_io_version() { return IO_VERSION; }

int32_t shardwell_io_uring() {
    Shape shape{};
    shape.depth = 1;
    return Ring(nullptr, shape).error();
}

void* shardwell_io_open(const Shape* shape, int32_t* error) {
    try {
        return new Queue(*shape);
    } catch (const std::system_error& problem) {
        *error = problem.code().value();
    } catch (const std::bad_alloc&) {
        *error = ENOMEM;
    }
    return nullptr;
}

void* shardwell_io_submit(void* queue, int32_t is_write, int32_t is_urgent, const Part* parts, int32_t num_parts) {
    try {
        return static_cast<Queue*>(queue)->submit(is_write != 0, is_urgent != 0, parts, num_parts);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

int32_t shardwell_io_wait(void* request, int64_t milliseconds, Outcome* outcome) {
    auto* const mine = static_cast<Request*>(request);
    std::unique_lock<std::mutex> lock(mine->mutex);
    const bool is_done =
        mine->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), [mine] { return mine->left == 0; });
    *outcome = mine->outcome;
    outcome->completed = mine->completed->load(std::memory_order_relaxed);
    return is_done ? 1 : 0;
}

void shardwell_io_forget(void* request) {
    auto* const mine = static_cast<Request*>(request);
    bool is_mine;
    {
        std::lock_guard<std::mutex> lock(mine->mutex);
        mine->is_forgotten = true;
        is_mine = mine->left == 0;
    }
    if (is_mine) delete mine;
}

void shardwell_io_close(void* queue) { delete static_cast<Queue*>(queue); }
