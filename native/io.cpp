// Queues of reads and writes. A request is cut into blocks; the threads of a lane take them in order. With io_uring a
// thread keeps many blocks in flight in a ring of its own, without it a thread has one block at a time.

#include "io.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
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
#include <system_error>
#include <thread>
#include <vector>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#if defined(IORING_FEAT_RW_CUR_POS) && defined(__NR_io_uring_setup)
#define SHARDWELL_IO_URING
#endif

namespace shardwell::io {
namespace {

struct Request {
    std::shared_ptr<std::atomic<int64_t>> completed;  // the queue's
    std::mutex mutex;
    std::condition_variable changed;
    int64_t left = 0;  // blocks
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
            if (left == 0) changed.notify_all();
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

void cut(const Part& part, int32_t index, bool is_write, int64_t size, Request* request, std::vector<Block>& blocks) {
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

// Blocks that wait, and how those who take them are told.
class Lane {
  public:
    void put(std::vector<Block>& blocks) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (Block& block : blocks) waiting_.push_back(std::move(block));
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
        changed_.wait(lock, [this] { return is_stopped_ || !waiting_.empty(); });
        return pop(block);
    }

    bool is_over() {
        std::lock_guard<std::mutex> lock(mutex_);
        return is_stopped_ && waiting_.empty();
    }

    void add_bell(int bell) { bells_.push_back(bell); }  // an eventfd; before the first block is put

  private:
    bool pop(Block& block) {
        if (waiting_.empty()) return false;
        block = std::move(waiting_.front());
        waiting_.pop_front();
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
    std::deque<Block> waiting_;
    std::vector<int> bells_;
    bool is_stopped_ = false;
};

void serve(Lane* lane) {
    Block block{};
    while (lane->await(block)) {
        while (block.advance(block.move_now())) {
        }
    }
}

#if defined(SHARDWELL_IO_URING)

constexpr uint64_t BELL = ~uint64_t{0};  // the name of the ring's wait for its lane, where blocks have their slot's

class Ring {
  public:
    Ring(Lane* lane, const Shape& shape) : lane_(lane), shape_(shape), slots_(static_cast<size_t>(shape.depth)) {
        for (int32_t slot = shape.depth; slot-- > 0;) vacant_.push_back(slot);
        bell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (bell_ < 0 || !set_up()) {
            error_ = errno;
            return;
        }
        if (lane_ != nullptr) lane_->add_bell(bell_);
    }

    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    ~Ring() {
        if (entries_ != MAP_FAILED) munmap(entries_, entries_size_);
        if (rings_ != MAP_FAILED) munmap(rings_, rings_size_);
        if (ring_ >= 0) close(ring_);
        if (bell_ >= 0) close(bell_);
    }

    int error() const { return error_; }

    void serve() {
        for (;;) {
            fill();
            if (vacant_.size() == slots_.size() && lane_->is_over()) return;
            if (!is_listening_) listen();
            if (!enter(1)) {
                fail(errno);
                return;
            }
            reap();
        }
    }

  private:
    bool set_up() {
        io_uring_params params{};
        ring_ = static_cast<int>(syscall(__NR_io_uring_setup, shape_.depth + 1, &params));
        if (ring_ < 0) return false;
        constexpr uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
        if ((params.features & needed) != needed) {  // before Linux 5.6
            errno = ENOSYS;
            return false;
        }
        rings_size_ = std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                               params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
        entries_size_ = params.sq_entries * sizeof(io_uring_sqe);
        rings_ = map(rings_size_, IORING_OFF_SQ_RING);
        entries_ = map(entries_size_, IORING_OFF_SQES);
        if (rings_ == MAP_FAILED || entries_ == MAP_FAILED) return false;
        char* const base = static_cast<char*>(rings_);
        submitted_ = reinterpret_cast<uint32_t*>(base + params.sq_off.tail);
        submit_mask_ = *reinterpret_cast<uint32_t*>(base + params.sq_off.ring_mask);
        order_ = reinterpret_cast<uint32_t*>(base + params.sq_off.array);
        reaped_ = reinterpret_cast<uint32_t*>(base + params.cq_off.head);
        ended_ = reinterpret_cast<uint32_t*>(base + params.cq_off.tail);
        end_mask_ = *reinterpret_cast<uint32_t*>(base + params.cq_off.ring_mask);
        ends_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
        return true;
    }

    void* map(size_t size, uint64_t what) {
        return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, static_cast<off_t>(what));
    }

    void fill() {
        if (!shape_.overlap_events && vacant_.size() < slots_.size()) return;
        Block block{};
        while (!vacant_.empty() && lane_->take(block)) {
            const int32_t slot = vacant_.back();
            vacant_.pop_back();
            slots_[static_cast<size_t>(slot)] = std::move(block);
            submit(slot);
        }
    }

    void submit(int32_t slot) {
        const Block& block = slots_[static_cast<size_t>(slot)];
        io_uring_sqe& entry = next_entry();
        entry.opcode = block.is_write ? IORING_OP_WRITE : IORING_OP_READ;
        entry.fd = block.file;
        entry.off = static_cast<uint64_t>(block.offset);
        entry.addr = reinterpret_cast<uint64_t>(block.address);
        entry.len = static_cast<uint32_t>(block.size);
        entry.user_data = static_cast<uint64_t>(slot);
        if (shape_.single_submit) enter(0);  // what it does not take, the next call does
    }

    void listen() {
        io_uring_sqe& entry = next_entry();
        entry.opcode = IORING_OP_POLL_ADD;
        entry.fd = bell_;
        entry.poll_events = POLLIN;
        entry.user_data = BELL;
        is_listening_ = true;
    }

    // There is always room: the ring has as many entries as there are slots, and one for the bell.
    io_uring_sqe& next_entry() {
        const uint32_t tail = *submitted_, at = tail & submit_mask_;
        io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[at];
        std::memset(&entry, 0, sizeof entry);
        order_[at] = at;
        num_unsent_ += 1;
        __atomic_store_n(submitted_, tail + 1, __ATOMIC_RELEASE);  // only seen in the next call
        return entry;
    }

    bool enter(uint32_t least) {
        for (;;) {
            const uint32_t flags = least > 0 ? IORING_ENTER_GETEVENTS : 0;
            const long sent = syscall(__NR_io_uring_enter, ring_, num_unsent_, least, flags, nullptr, size_t{0});
            if (sent >= 0) {
                num_unsent_ -= static_cast<uint32_t>(sent);
                return true;
            }
            if (errno == EAGAIN || errno == EBUSY) {  // the kernel is short of memory: what is in flight comes first
                if (*reaped_ != __atomic_load_n(ended_, __ATOMIC_ACQUIRE)) return true;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            } else if (errno != EINTR) {
                return false;
            }
        }
    }

    void reap() {
        uint32_t head = *reaped_;
        const uint32_t tail = __atomic_load_n(ended_, __ATOMIC_ACQUIRE);
        for (; head != tail; ++head) {
            const io_uring_cqe& entry = ends_[head & end_mask_];
            if (entry.user_data == BELL) {
                uint64_t rings;
                is_listening_ = false;
                while (read(bell_, &rings, sizeof rings) < 0 && errno == EINTR) {
                }
                continue;
            }
            const auto slot = static_cast<int32_t>(entry.user_data);
            if (slots_[static_cast<size_t>(slot)].advance(entry.res)) {
                again_.push_back(slot);
            } else {
                vacant_.push_back(slot);
            }
        }
        __atomic_store_n(reaped_, head, __ATOMIC_RELEASE);
        for (const int32_t slot : again_) submit(slot);
        again_.clear();
    }

    // The ring itself is broken: all that it has and all that may come ends with the error.
    void fail(int32_t error) {
        for (int32_t slot = 0; slot < shape_.depth; ++slot) {
            if (std::find(vacant_.begin(), vacant_.end(), slot) == vacant_.end()) {
                slots_[static_cast<size_t>(slot)].end(error);
            }
        }
        Block block{};
        while (lane_->await(block)) block.end(error);
    }

    Lane* lane_;
    Shape shape_;
    std::vector<Block> slots_;
    std::vector<int32_t> vacant_, again_;
    bool is_listening_ = false;
    int bell_ = -1, ring_ = -1, error_ = 0;
    void *rings_ = MAP_FAILED, *entries_ = MAP_FAILED;
    size_t rings_size_ = 0, entries_size_ = 0;
    uint32_t *submitted_ = nullptr, *order_ = nullptr, *reaped_ = nullptr, *ended_ = nullptr;
    uint32_t submit_mask_ = 0, end_mask_ = 0, num_unsent_ = 0;
    io_uring_cqe* ends_ = nullptr;
};

#else

class Ring {
  public:
    Ring(Lane*, const Shape&) {}
    int error() const { return ENOSYS; }
    void serve() {}
};

#endif

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

    Request* submit(bool is_write, const Part* parts, int32_t num_parts) {
        std::vector<std::vector<Block>> blocks(lanes_.size());
        auto request = std::make_unique<Request>();
        for (int32_t index = 0; index < num_parts; ++index) {
            const Part& part = parts[index];
            cut(part, index, is_write, shape_.block, request.get(), blocks[static_cast<size_t>(part.lane)]);
        }
        request->completed = completed_;
        for (const auto& mine : blocks) request->left += static_cast<int64_t>(mine.size());
        for (size_t lane = 0; lane < lanes_.size(); ++lane) {
            if (!blocks[lane].empty()) lanes_[lane].put(blocks[lane]);
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

void* shardwell_io_submit(void* queue, int32_t is_write, const Part* parts, int32_t num_parts) {
    try {
        return static_cast<Queue*>(queue)->submit(is_write != 0, parts, num_parts);
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
