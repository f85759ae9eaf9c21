// Counts the calls that change files below a folder, and at the n-th of them kills the process, or fails the call.
//
//     cc -shared -fPIC -O1 -o shim.so shim.c -ldl;  LD_PRELOAD=./shim.so python ...
//
// Dormant until faults_arm(). Modes: what happens at call number `fuse`, counted from 1 (0: nothing, only count).
//   0 KILL   before the call
//   1 TORN   a write has written half of its bytes; any other call is done
//   2 POWER  before the call, and of every file that was not synced since it was written half is lost
//   3 FULL   this write and all later ones fail with ENOSPC; so do new files and folders
//   4 EIO    this call fails with EIO
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL, TORN, POWER, FULL, EIO_ONCE };
enum { MAX_DIRTY = 256, LONG = 4096 };

static char folder[LONG];
static long fuse, count;
static int mode, log_fd = -1, is_armed;
static char dirty[MAX_DIRTY][LONG];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// log: a descriptor that gets a line "CALL NAME" per call, "!CALL NAME" for what is struck.
void faults_arm(const char *below, long at, int how, int log) {
    snprintf(folder, sizeof folder, "%s", below);
    fuse = at, mode = how, log_fd = log, count = 0, is_armed = 1;
    memset(dirty, 0, sizeof dirty);
}

void faults_disarm(void) { is_armed = 0; }

long faults_count(void) { return count; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, LONG - 1);
    out[n < 0 ? 0 : n] = 0;
}

static void resolve(int dir, const char *path, char *out) {
    if (path[0] == '/') {
        snprintf(out, LONG, "%s", path);
    } else if (dir == AT_FDCWD) {
        char here[LONG / 2];
        snprintf(out, LONG, "%s/%s", getcwd(here, sizeof here) ? here : "", path);
    } else {
        char base[LONG];
        path_of(dir, base);
        snprintf(out, LONG, "%.*s/%s", LONG / 2, base, path);
    }
}

static int is_below(const char *path) {
    return is_armed && strncmp(path, folder, strlen(folder)) == 0;
}

static int find_dirty(const char *path) {
    for (int k = 0; k < MAX_DIRTY; k++)
        if (!strcmp(dirty[k], path)) return k;
    return -1;
}

static void note_written(const char *path) {
    int k = find_dirty(path);
    if (k < 0 && (k = find_dirty("")) >= 0) snprintf(dirty[k], LONG, "%s", path);
}

static void note_synced(const char *path) {
    int k = find_dirty(path);
    if (k >= 0) dirty[k][0] = 0;
}

static void note_renamed(const char *from, const char *to) {
    note_synced(to);
    size_t n = strlen(from);
    for (int k = 0; k < MAX_DIRTY; k++)
        if (dirty[k][0] && !strncmp(dirty[k], from, n) && (dirty[k][n] == 0 || dirty[k][n] == '/')) {
            char moved[LONG];
            snprintf(moved, LONG, "%.*s%s", LONG / 2, to, dirty[k] + n);
            memcpy(dirty[k], moved, LONG);
        }
}

static void die(void) {
    if (mode == POWER)
        for (int k = 0; k < MAX_DIRTY; k++) {
            struct stat status;
            if (dirty[k][0] && !stat(dirty[k], &status) && truncate(dirty[k], status.st_size / 2)) {}
        }
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

// Number of this call; dies or says with which error it fails (0: none). is_new: it makes a file or writes to one.
static int pass(const char *call, const char *path, int is_new, long *number) {
    long n = __sync_add_and_fetch(&count, 1);
    *number = n;
    int fails = fuse && ((mode == FULL && n >= fuse && is_new) || (mode == EIO_ONCE && n == fuse));
    dprintf(log_fd, "%s%s %s\n", n == fuse || fails ? "!" : "", call, path + strlen(folder));
    if (n == fuse && (mode == KILL || mode == POWER)) die();
    return !fails ? 0 : mode == FULL ? ENOSPC : EIO;
}

static void passed(long number) {
    if (number == fuse && mode == TORN) die();
}

#define CALL(result_type, call, path, is_new, real, after)          \
    do {                                                            \
        long number;                                                \
        pthread_mutex_lock(&lock);                                  \
        int error = pass(call, path, is_new, &number);              \
        pthread_mutex_unlock(&lock);                                \
        if (error) { errno = error; return -1; }                    \
        result_type done = (real);                                  \
        int kept = errno;                                           \
        pthread_mutex_lock(&lock);                                  \
        if (done >= 0) { after; }                                   \
        passed(number);                                             \
        pthread_mutex_unlock(&lock);                                \
        errno = kept;                                               \
        return done;                                                \
    } while (0)

#define MAKES(flags) (((flags) & (O_CREAT | O_TRUNC)) != 0)

static int open_(int dir, const char *path, int flags, mode_t bits, int (*real)(int, const char *, int, ...)) {
    char whole[LONG];
    resolve(dir, path, whole);
    if (!MAKES(flags) || !is_below(whole)) return real(dir, path, flags, bits);
    CALL(int, "open", whole, 1, real(dir, path, flags, bits), note_written(whole));
}

#define OPEN(name, dir_parameter, dir)                                          \
    int name(dir_parameter const char *path, int flags, ...) {                  \
        va_list rest;                                                           \
        va_start(rest, flags);                                                  \
        mode_t bits = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                           \
        return open_(dir, path, flags, bits, REAL(openat));                     \
    }
#define DIR_PARAMETER int dir,
OPEN(open, , AT_FDCWD)
OPEN(open64, , AT_FDCWD)
OPEN(openat, DIR_PARAMETER, dir)
OPEN(openat64, DIR_PARAMETER, dir)

ssize_t write(int fd, const void *data, size_t n) {
    char path[LONG];
    if (!is_armed || (path_of(fd, path), !is_below(path))) return REAL(write)(fd, data, n);
    size_t some = mode == TORN && count + 1 == fuse ? (n + 1) / 2 : n;
    CALL(ssize_t, "write", path, 1, REAL(write)(fd, data, some), note_written(path));
}

ssize_t writev(int fd, const struct iovec *parts, int n) {
    char path[LONG];
    if (!is_armed || (path_of(fd, path), !is_below(path))) return REAL(writev)(fd, parts, n);
    CALL(ssize_t, "write", path, 1, REAL(writev)(fd, parts, n), note_written(path));
}

#define ON_FD(name, call, parameters, arguments, is_new, after)                           \
    int name parameters {                                                                 \
        char path[LONG];                                                                  \
        if (!is_armed || (path_of(fd, path), !is_below(path))) return REAL(name) arguments; \
        CALL(int, call, path, is_new, REAL(name) arguments, after);                       \
    }
ON_FD(fsync, "fsync", (int fd), (fd), 0, note_synced(path))
ON_FD(fdatasync, "fsync", (int fd), (fd), 0, note_synced(path))
ON_FD(ftruncate, "truncate", (int fd, off_t n), (fd, n), 1, note_written(path))
ON_FD(ftruncate64, "truncate", (int fd, off64_t n), (fd, n), 1, note_written(path))
ON_FD(fchmod, "chmod", (int fd, mode_t bits), (fd, bits), 0, )

#define ON_PATH(name, call, parameters, arguments, dir, is_new)          \
    int name parameters {                                                \
        char whole[LONG];                                                \
        resolve(dir, path, whole);                                       \
        if (!is_below(whole)) return REAL(name) arguments;               \
        CALL(int, call, whole, is_new, REAL(name) arguments, );          \
    }
ON_PATH(mkdir, "mkdir", (const char *path, mode_t bits), (path, bits), AT_FDCWD, 1)
ON_PATH(mkdirat, "mkdir", (int dir, const char *path, mode_t bits), (dir, path, bits), dir, 1)
ON_PATH(rmdir, "rmdir", (const char *path), (path), AT_FDCWD, 0)
ON_PATH(unlink, "unlink", (const char *path), (path), AT_FDCWD, 0)
ON_PATH(unlinkat, "unlink", (int dir, const char *path, int flags), (dir, path, flags), dir, 0)
ON_PATH(chmod, "chmod", (const char *path, mode_t bits), (path, bits), AT_FDCWD, 0)

static int rename_(int from_dir, const char *from, int to_dir, const char *to) {
    char a[LONG], b[LONG];
    resolve(from_dir, from, a);
    resolve(to_dir, to, b);
    if (!is_below(b)) return REAL(renameat)(from_dir, from, to_dir, to);
    CALL(int, "rename", b, 0, REAL(renameat)(from_dir, from, to_dir, to), note_renamed(a, b));
}

int rename(const char *from, const char *to) { return rename_(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int a, const char *from, int b, const char *to) { return rename_(a, from, b, to); }

static int link_(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    char whole[LONG];
    resolve(to_dir, to, whole);
    if (!is_below(whole)) return REAL(linkat)(from_dir, from, to_dir, to, flags);
    CALL(int, "link", whole, 1, REAL(linkat)(from_dir, from, to_dir, to, flags), );
}

int link(const char *from, const char *to) { return link_(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int a, const char *from, int b, const char *to, int flags) { return link_(a, from, b, to, flags); }
