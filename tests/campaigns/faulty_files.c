/* Lets calls on files in one folder fail, for a process that preloads this library (LD_PRELOAD).

   FAULTS_FOLDER names the folder. faults_arm(n, error, stays) lets the n-th call from now on that touches it fail with
   this error number, and with `stays` all calls after it too; error 0 lets a read or write move only half of its bytes.
   faults_disarm() ends that and returns how many such calls were made. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int armed, calls, nth, error_number, stays;

void faults_arm(int n, int error, int for_good) {
    nth = n;
    error_number = error;
    stays = for_good;
    calls = 0;
    armed = 1;
}

int faults_disarm(void) {
    armed = 0;
    return calls;
}

enum { FINE, FAILS, HALF };

static int verdict(const char *path) {
    const char *folder = getenv("FAULTS_FOLDER");
    if (!folder || !strstr(path, folder)) return FINE;
    int number = atomic_fetch_add(&calls, 1);
    if (number != nth && !(stays && nth >= 0 && number > nth)) return FINE;
    if (error_number == 0) return HALF;
    errno = error_number;
    return FAILS;
}

static int verdict_at(int directory, const char *path) {
    char link[64], folder[4096] = "";
    if (!armed) return FINE;
    if (path[0] == '/') return verdict(path);
    if (directory == AT_FDCWD) return FINE; /* the campaign names files by absolute paths */
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t size = readlink(link, folder, sizeof folder - 1);
    return size > 0 ? verdict(folder) : FINE;
}

static int verdict_of(int file) { return armed ? verdict_at(file, "") : FINE; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static mode_t mode_of(int flags, va_list rest) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name)                                              \
    int name(const char *path, int flags, ...) {                \
        va_list rest;                                           \
        va_start(rest, flags);                                  \
        mode_t mode = mode_of(flags, rest);                     \
        va_end(rest);                                           \
        if (verdict_at(AT_FDCWD, path) == FAILS) return -1;     \
        return REAL(name)(path, flags, mode);                   \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                            \
    int name(int directory, const char *path, int flags, ...) { \
        va_list rest;                                           \
        va_start(rest, flags);                                  \
        mode_t mode = mode_of(flags, rest);                     \
        va_end(rest);                                           \
        if (verdict_at(directory, path) == FAILS) return -1;    \
        return REAL(name)(directory, path, flags, mode);        \
    }
OPENAT(openat)
OPENAT(openat64)

#define MOVES(name, type, arguments, half, ...)                                         \
    ssize_t name(int file, type data, size_t size arguments) {                          \
        int now = verdict_of(file);                                                     \
        if (now == FAILS) return -1;                                                    \
        return REAL(name)(file, data, now == HALF && size > 1 ? half : size __VA_ARGS__); \
    }
#define COMMA ,
MOVES(read, void *, , size / 2)
MOVES(write, const void *, , size / 2)
MOVES(pread, void *, COMMA off_t at, size / 2, , at)
MOVES(pread64, void *, COMMA off64_t at, size / 2, , at)
MOVES(pwrite, const void *, COMMA off_t at, size / 2, , at)
MOVES(pwrite64, const void *, COMMA off64_t at, size / 2, , at)

#define VECTORS(name, arguments, ...)                                                              \
    ssize_t name(int file, const struct iovec *parts, int count, arguments) {                      \
        int now = verdict_of(file);                                                                \
        if (now == FAILS) return -1;                                                               \
        struct iovec first = *parts;                                                               \
        if (now != HALF || first.iov_len < 2) return REAL(name)(file, parts, count, __VA_ARGS__);  \
        first.iov_len /= 2;                                                                        \
        return REAL(name)(file, &first, 1, __VA_ARGS__);                                           \
    }
VECTORS(preadv, off_t at, at)
VECTORS(pwritev, off_t at, at)
VECTORS(preadv64, off64_t at, at)
VECTORS(pwritev64, off64_t at, at)
VECTORS(preadv2, off_t at COMMA int flags, at, flags)
VECTORS(pwritev2, off_t at COMMA int flags, at, flags)
VECTORS(preadv64v2, off64_t at COMMA int flags, at, flags)
VECTORS(pwritev64v2, off64_t at COMMA int flags, at, flags)

#define OF_FILE(name, declared, passed)                      \
    int name declared {                                      \
        return verdict_of(file) == FAILS ? -1 : REAL(name) passed; \
    }
OF_FILE(fsync, (int file), (file))
OF_FILE(fdatasync, (int file), (file))
OF_FILE(ftruncate, (int file, off_t size), (file, size))
OF_FILE(ftruncate64, (int file, off64_t size), (file, size))

int posix_fallocate64(int file, off64_t at, off64_t size) {
    return verdict_of(file) == FAILS ? error_number : REAL(posix_fallocate64)(file, at, size);
}
int posix_fallocate(int file, off_t at, off_t size) {
    return verdict_of(file) == FAILS ? error_number : REAL(posix_fallocate)(file, at, size);
}
int rename(const char *old, const char *new) {
    return verdict_at(AT_FDCWD, old) == FAILS ? -1 : REAL(rename)(old, new);
}
int mkdir(const char *path, mode_t mode) {
    return verdict_at(AT_FDCWD, path) == FAILS ? -1 : REAL(mkdir)(path, mode);
}
int unlink(const char *path) { return verdict_at(AT_FDCWD, path) == FAILS ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return verdict_at(AT_FDCWD, path) == FAILS ? -1 : REAL(rmdir)(path); }
