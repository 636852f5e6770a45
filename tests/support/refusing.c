/* Preloaded into a target: the C library refuses one call of those that hookd's threads make, the Nth, with an errno.
 *
 * The file named by REFUSALS is the struct below, which the test writes and reads. Calls of the main thread are the
 * program's own, but for the threads that it starts. Descriptors, threads, mappings and files are what it refuses: memory
 * that malloc gives comes out of its own mappings, and is not seen here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

struct control {
    int nth;     /* which call is refused, counted from 1; 0: none, and none is counted */
    int error;   /* with what errno */
    int seen;    /* how many have been made */
    char name[20]; /* of the one that was refused */
    char names[200]; /* of those that are counted, each between blanks; none: all */
};

static struct control *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("REFUSALS");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *memory = (void *)syscall(SYS_mmap, NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0L);
    syscall(SYS_close, fd);
    if (memory != MAP_FAILED)
        control = memory;
}

static int is_refused(const char *name) {
    int is_ours = syscall(SYS_gettid) != getpid() || !strcmp(name, "pthread_create");
    if (!control || !control->nth || !is_ours)
        return 0;
    char word[24] = " ";
    if (control->names[0] && !strstr(control->names, strcat(strcat(word, name), " ")))
        return 0;
    if (__sync_add_and_fetch(&control->seen, 1) != control->nth)
        return 0;
    strncpy(control->name, name, sizeof control->name - 1);
    errno = control->error;
    return 1;
}

#define ORIGINAL(name) static __typeof__(&name) original; if (!original) original = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define REFUSABLE(kind, failed, name, parameters, arguments)                                                           \
    kind name parameters {                                                                                             \
        ORIGINAL(name);                                                                                                \
        return is_refused(#name) ? failed : original arguments;                                                        \
    }

REFUSABLE(int, -1, socket, (int a, int b, int c), (a, b, c))
REFUSABLE(int, -1, socketpair, (int a, int b, int c, int d[2]), (a, b, c, d))
REFUSABLE(int, -1, listen, (int a, int b), (a, b))
REFUSABLE(int, -1, fchmod, (int a, mode_t b), (a, b))
REFUSABLE(int, -1, memfd_create, (const char *a, unsigned b), (a, b))
REFUSABLE(int, -1, ftruncate64, (int a, off64_t b), (a, b))
REFUSABLE(void *, MAP_FAILED, mmap64, (void *a, size_t b, int c, int d, int e, off64_t f), (a, b, c, d, e, f))
REFUSABLE(void *, MAP_FAILED, mmap, (void *a, size_t b, int c, int d, int e, off_t f), (a, b, c, d, e, f))
REFUSABLE(int, -1, mprotect, (void *a, size_t b, int c), (a, b, c))

int bind(int a, const struct sockaddr *b, socklen_t c) {
    ORIGINAL(bind);
    return is_refused("bind") ? -1 : original(a, b, c);
}

/* POSIX: it returns the error. */
int pthread_create(pthread_t *a, const pthread_attr_t *b, void *(*c)(void *), void *d) {
    ORIGINAL(pthread_create);
    return is_refused("pthread_create") ? EAGAIN : original(a, b, c, d);
}

#define WITH_MODE(name)                                                                                                \
    int name(const char *path, int flags, ...) {                                                                       \
        ORIGINAL(name);                                                                                                \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = va_arg(more, mode_t);                                                                            \
        va_end(more);                                                                                                  \
        return is_refused(#name) ? -1 : original(path, flags, mode);                                                   \
    }

WITH_MODE(open)
WITH_MODE(open64)

#define WITH_ARGUMENT(name)                                                                                            \
    int name(int fd, int command, ...) {                                                                               \
        ORIGINAL(name);                                                                                                \
        va_list more;                                                                                                  \
        va_start(more, command);                                                                                       \
        long argument = va_arg(more, long);                                                                            \
        va_end(more);                                                                                                  \
        return is_refused(#name) ? -1 : original(fd, command, argument);                                               \
    }

WITH_ARGUMENT(fcntl)
WITH_ARGUMENT(fcntl64)
