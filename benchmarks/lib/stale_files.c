/* Preloaded into all processes of a run: while a file exists, some files of the run directory have a stale handle:
 * those of `names`, and the signs of life of a job's nodes, launch/ID/node-N.json.
 *
 * It is what NFS answers for a file that another host has replaced. SOAK_STALE_DIR: the run directory.
 * SOAK_STALE_ORDER: the file whose existence makes the handles stale; each answer leaves a line, the name of the file
 * that was asked for, in the file of that name with ".hits". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *names[] = {"stop", "supervisor.json", "claim.json"};
static const char *directory, *order;
static size_t length;
static char hits[4096];

__attribute__((constructor)) static void begin(void) {
    directory = getenv("SOAK_STALE_DIR");
    order = getenv("SOAK_STALE_ORDER");
    length = directory ? strlen(directory) : 0;
    if (order) snprintf(hits, sizeof hits, "%s.hits", order);
}

static const char *file_of(const char *path) {
    if (!length || !order || !path || strncmp(path, directory, length) || path[length] != '/') return NULL;
    const char *inside = path + length + 1, *file = strrchr(path, '/') + 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(inside, names[i])) return names[i];
    return !strncmp(inside, "launch/", 7) && !strncmp(file, "node-", 5) ? file : NULL;
}

/* Tell whether the handle of a path is stale now; errno then says so. System calls, not functions: those are ours. */
static int stale(const char *path) {
    const char *name = file_of(path);
    if (!name) return 0;
    int before = errno;
    int is_stale = !syscall(SYS_faccessat, AT_FDCWD, order, F_OK);
    errno = before;
    if (!is_stale) return 0;
    char line[64];
    int size = snprintf(line, sizeof line, "%s\n", name);
    long file = syscall(SYS_openat, AT_FDCWD, hits, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file >= 0) {
        if (write((int)file, line, (size_t)size) != size) perror(hits);
        close((int)file);
    }
    errno = ESTALE;
    return 1;
}

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        MODE(flags) \
        NEXT(name); \
        return stale(path) ? -1 : next(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int at, const char *path, int flags, ...) { \
        MODE(flags) \
        NEXT(name); \
        return stale(path) ? -1 : next(at, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define STAT(name, type) \
    int name(const char *path, struct type *found) { \
        NEXT(name); \
        return stale(path) ? -1 : next(path, found); \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

#define STATAT(name, type) \
    int name(int at, const char *path, struct type *found, int flags) { \
        NEXT(name); \
        return stale(path) ? -1 : next(at, path, found, flags); \
    }
STATAT(fstatat, stat)
STATAT(fstatat64, stat64)

int utimensat(int at, const char *path, const struct timespec times[2], int flags) {
    NEXT(utimensat);
    return stale(path) ? -1 : next(at, path, times, flags);
}

int rename(const char *from, const char *to) {
    NEXT(rename);
    return stale(to) ? -1 : next(from, to);
}

int renameat(int at, const char *from, int in, const char *to) {
    NEXT(renameat);
    return stale(to) ? -1 : next(at, from, in, to);
}
