// A ring of io_uring: one thread that keeps many blocks in flight. By the kernel's own calls, without a library.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "io_blocks.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#if defined(IORING_FEAT_RW_CUR_POS) && defined(__NR_io_uring_setup)
#define SHARDWELL_IO_URING
#endif

namespace shardwell::io {

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

}  // namespace shardwell::io
